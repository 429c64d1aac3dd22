"""PrefillService: the order, the progress that a prefill worker reports, and stops of a writer.

The log probabilities of a prompt's tokens travel in pieces, and their arrays as bytes. A long
prompt has a quarter of a million entries. As repeated fields each would be one Python object on the
router's loop; as bytes a piece is copied and its shape is checked.
"""

from __future__ import annotations

import numpy as np

from ferryman.errors import InvalidRequest, TooLarge
from ferryman.schedule.prompt_scores import PIECE_ENTRIES, PromptScores
from ferryman.wire.codec.message_table import At, Codec, oneof, table
from ferryman.wire.codec.request import (
    CONTEXT,
    REQUEST,
    SIGNATURE,
    USAGE,
    address_to_wire,
    reachable_from_wire,
)
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

_ID_BYTES, _REAL_BYTES = 4, 8


def scores_to_wire(scores: PromptScores) -> types_pb2.PromptScores:
    return types_pb2.PromptScores(
        first=scores.first,
        token_ids=np.ascontiguousarray(scores.token_ids, "<u4").tobytes(),
        logprobs=np.ascontiguousarray(scores.logprobs, "<f8").tobytes(),
        ranks=np.ascontiguousarray(scores.ranks, "<u4").tobytes(),
    )


def scores_from_wire(message: types_pb2.PromptScores) -> PromptScores:
    """Raises InvalidRequest for arrays that do not belong together or hold what is no number, and
    TooLarge for more than a piece."""
    num_entries, num_tokens = _num_entries(message), len(message.ranks) // _ID_BYTES
    if num_entries > PIECE_ENTRIES:
        raise TooLarge(f"a piece has at most {PIECE_ENTRIES} entries", "prompt_scores")
    logprobs = np.frombuffer(message.logprobs, "<f8").reshape(num_tokens, -1)
    if message.first < 1 or not np.isfinite(logprobs).all():
        raise InvalidRequest("scores are finite, and of tokens behind others", "prompt_scores")
    return PromptScores(
        message.first,
        np.frombuffer(message.token_ids, "<u4").reshape(num_tokens, -1),
        logprobs,
        np.frombuffer(message.ranks, "<u4"),
    )


def _num_entries(message: types_pb2.PromptScores) -> int:
    """Whole numbers, at least one entry for each token, as many for every token."""
    num_entries, odd_ids = divmod(len(message.token_ids), _ID_BYTES)
    num_reals, odd_reals = divmod(len(message.logprobs), _REAL_BYTES)
    num_tokens, odd_ranks = divmod(len(message.ranks), _ID_BYTES)
    is_odd = odd_ids or odd_reals or odd_ranks or num_entries != num_reals
    if is_odd or not num_tokens or not num_entries or num_entries % num_tokens:
        message_text = (
            f"{num_entries} token ids, {num_reals} log probabilities and {num_tokens} ranks are no"
            " scores of a prompt"
        )
        raise InvalidRequest(message_text, "prompt_scores")
    return num_entries


SCORES: Codec[PromptScores, types_pb2.PromptScores] = Codec(scores_to_wire, scores_from_wire)


def _reachable_decode(message: types_pb2.WorkerAddress) -> WorkerAddress:
    return reachable_from_wire(message, "decode")


ORDER = table(
    PrefillOrder,
    pb.PrefillRequest,
    request=REQUEST,
    context=CONTEXT,
    decode=At(address_to_wire, _reachable_decode),
    signature=SIGNATURE,
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
