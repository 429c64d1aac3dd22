// Server-sent events over fetch: EventSource can send no header, and a key belongs in no URL.

const MAX_BUFFER = 8 << 20; // a stream that sends no end of an event is broken

/** Yields {event, data} of a response's body. */
export async function* serverSentEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      buffer += value;
      const frames = buffer.split("\n\n");
      buffer = frames.pop();
      if (buffer.length > MAX_BUFFER) throw new Error("an event has no end");
      for (const frame of frames) {
        const event = eventOf(frame);
        if (event.data) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function eventOf(frame) {
  const event = { event: "message", data: "" };
  for (const line of frame.split("\n")) {
    if (line.startsWith("event: ")) event.event = line.slice(7);
    else if (line.startsWith("data: ")) event.data += line.slice(6);
  }
  return event;
}

/** The words of a refusal, as the router gives them. */
export async function refusalText(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the router answered ${response.status}`;
  }
}
