"""Marks papers: an answer is right when greedy decoding would write all of it.

One forward over prompt and right answer shows that: greedy decoding gives exactly this answer if
each of its tokens is the likeliest after the tokens before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from random import Random

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tools.demo.curriculum import LabelledTokens, labelled
from tools.demo.evaluation import Exam, exams
from tools.demo.network import DemoShape, Network
from tools.demo.stories import Message
from torch import Tensor

HELD_OUT = "examination"


@dataclass(frozen=True, slots=True)
class ExamScore:
    """A line of the table."""

    name: str
    longest: int
    right: int
    asked: int

    @property
    def line(self) -> str:
        share = 100 * self.right / self.asked
        return f"{self.name:<38} {self.longest:>7,} {self.right:>6}/{self.asked:<6} {share:6.2f} %"


def load_network(folder: Path) -> Network:
    """The folder's weights in the training's own module."""
    config = json.loads((folder / "config.json").read_text())
    names = {
        "vocab": "vocab_size",
        "hidden": "hidden_size",
        "layers": "layer_types",
        "mlp": "shared_intermediate_size",
        "q_heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "ssm_heads": "mamba_n_heads",
        "ssm_head_dim": "mamba_d_head",
        "ssm_state": "mamba_d_state",
        "conv_width": "mamba_d_conv",
        "norm_eps": "rms_norm_eps",
    }
    known = {f.name: names.get(f.name, f.name) for f in fields(DemoShape)}
    sizes = {name: config[key] for name, key in known.items() if key in config}
    network = Network(DemoShape(**{**sizes, "layers": tuple(sizes["layers"])}))
    network.load_state_dict(load_file(folder / "model.safetensors"))
    return network.eval()


def likeliest(network: Network, rows: list[list[int]]) -> list[list[int]]:
    """For each token of each row, the token that greedy decoding would write after it."""
    piece = network.shape.piece
    length = -(-max(map(len, rows)) // piece) * piece
    token_ids = torch.zeros(len(rows), length, dtype=torch.long)
    for row, ids in enumerate(rows):
        token_ids[row, : len(ids)] = torch.tensor(ids)
    wanted = torch.arange(length) < torch.tensor([len(ids) for ids in rows])[:, None]
    with torch.inference_mode():
        best: Tensor = network(token_ids, wanted).argmax(-1)
    return [part.tolist() for part in torch.split(best, [len(ids) for ids in rows])]


def answers(paper: LabelledTokens) -> Iterator[range]:
    """The token ranges of answers, their end tokens included."""
    start = None
    for index, learned in enumerate([*paper.learned, False]):
        if learned and start is None:
            start = index
        if not learned and start is not None:
            yield range(start, index)
            start = None


def right_answers(paper: LabelledTokens, best: list[int]) -> list[bool]:
    """For each answer of a paper, whether greedy decoding would write it."""
    return [
        all(best[index - 1] == paper.token_ids[index] for index in answer)
        for answer in answers(paper)
    ]


def mark(network: Network, tokenizer: Tokenizer, papers: list[list[Message]]) -> list[bool]:
    """Marks papers, eight at a time."""
    marks: list[bool] = []
    sheets = [labelled(tokenizer, messages) for messages in papers]
    for start in range(0, len(sheets), 8):
        batch = sheets[start : start + 8]
        for paper, best in zip(
            batch, likeliest(network, [p.token_ids for p in batch]), strict=True
        ):
            marks += right_answers(paper, best)
    return marks


def grade_exam(network: Network, tokenizer: Tokenizer, exam: Exam) -> ExamScore:
    """Writes an exam's papers from held-out seeds, and marks them."""
    papers = [exam.write(Random(f"{HELD_OUT} {exam.name} {n}")) for n in range(exam.papers)]
    longest = max(len(labelled(tokenizer, paper).token_ids) for paper in papers)
    marks = mark(network, tokenizer, papers)
    return ExamScore(exam.name, longest, sum(marks), len(marks))


def print_table(folder: Path, *, papers: int, dtype: torch.dtype) -> list[ExamScore]:
    """Examines a model folder and prints a line for each exam."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    network = load_network(folder).to(dtype)
    print(f"{'exam':<38} {'longest':>7} {'right/asked':>13} {'share':>8}")
    marks = []
    for exam in exams(tokenizer, papers):
        marks.append(grade_exam(network, tokenizer, exam))
        print(marks[-1].line, flush=True)
    return marks
