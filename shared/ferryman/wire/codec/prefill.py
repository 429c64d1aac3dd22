"""PrefillService: the order, the progress that a prefill worker reports, and stops of a writer."""

from __future__ import annotations

from ferryman.schedule.prompt_scores import PromptScores
from ferryman.wire.codec.message_table import At, Codec, oneof, table
from ferryman.wire.codec.request import (
    CONTEXT,
    REQUEST,
    USAGE,
    address_to_wire,
    reachable_from_wire,
)
from ferryman.wire.codec.scores import SCORES
from ferryman.wire.v1 import prefill_pb2 as pb
from ferryman.wire.v1 import types_pb2
from ferryman.wire.values import (
    PrefillAdmitted,
    PrefillChunkDone,
    PrefillHandedOff,
    PrefillOrder,
    PrefillProgress,
    PrefillQueued,
    StopAnswer,
    StopOrder,
    WorkerAddress,
)


def _reachable_decode(message: types_pb2.WorkerAddress) -> WorkerAddress:
    return reachable_from_wire(message, "decode")


ORDER = table(
    PrefillOrder,
    pb.PrefillRequest,
    request=REQUEST,
    context=CONTEXT,
    decode=At(address_to_wire, _reachable_decode),
)
prefill_order_to_wire, prefill_order_from_wire = ORDER

PROGRESS: Codec[PrefillProgress, pb.PrefillResponse] = oneof(
    pb.PrefillResponse,
    "progress",
    "a progress message says nothing",
    queued=(PrefillQueued, table(PrefillQueued, pb.PrefillQueued)),
    admitted=(PrefillAdmitted, table(PrefillAdmitted, pb.PrefillAdmitted, usage=USAGE)),
    chunk=(PrefillChunkDone, table(PrefillChunkDone, pb.PrefillChunk)),
    scored=(PromptScores, SCORES),
    handed_off=(PrefillHandedOff, table(PrefillHandedOff, pb.PrefillHandedOff, usage=USAGE)),
)
progress_to_wire, progress_from_wire = PROGRESS

stop_order_to_wire, stop_order_from_wire = table(StopOrder, pb.StopWritingRequest)
stop_answer_to_wire, stop_answer_from_wire = table(StopAnswer, pb.StopWritingResponse)
