"""`python -m tools.bench model`: decode and prefill, against transformers and llama.cpp.

All contenders have the same random weights and a process of their own. They are timed in turn, a
few runs each, and a ratio is the median over the rounds of each round's ratio: a machine that is
busy for a while slows all of them alike.
"""

from __future__ import annotations

import importlib.util
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from tools.bench.contender import BenchCell
from tools.bench.contender_process import (
    LLAMA_CPP,
    OURS,
    TRANSFORMERS,
    contender_process,
)
from tools.bench.contest_plot import ratio_figure
from tools.bench.contest_result import CellResult, CellTimes, ContestResult, show_comparison
from tools.bench.gguf.conversion import convert_folder

from ferryman.errors import ConfigError
from ferryman_bench.engine_process import BenchModel, EngineProcess
from ferryman_bench.hardware import machine_now
from ferryman_bench.random_model import make_random_model
from ferryman_bench.shape import shape_named
from ferryman_simulator.report import check_plot, save_figure

PEERS = {TRANSFORMERS: "transformers", LLAMA_CPP: "llama_cpp"}
"""The packages of the peers."""

IMPOSSIBLE = {(TRANSFORMERS, "int8")}
"""Peers without a dtype on a processor."""

PROBE_TOKENS = 96
RUNS = {"decode": 4, "prefill": 1}
WARM_UPS = {"decode": 2, "prefill": 1}
# The difference of logits that rounding explains, as a share of their size; another model's would
# be 1.4. In few bits a router now and then chooses another expert, and float32 is the proof.
MAX_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.3, "int8": 0.3}


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options of a measurement. A round is some decode steps, or one prefill, of each contender.

    `peers` empty: all that are installed.
    """

    shape: str = "granite-100m"
    dtype: str = "bfloat16"
    threads: int = 2
    rounds: int = 7
    batches: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (128,)
    prefills: tuple[int, ...] = (512, 2048)
    peers: tuple[str, ...] = ()

    @property
    def cells(self) -> tuple[BenchCell, ...]:
        decodes = [BenchCell("decode", batch, n) for n in self.contexts for batch in self.batches]
        return (*decodes, *(BenchCell("prefill", 1, tokens) for tokens in self.prefills))


def run_bench(choice: BenchOptions, *, as_json: bool, plot: Path | None) -> int:
    if plot is not None:
        check_plot(plot)
    comparison = compare_contenders(choice)
    if plot is not None:
        save_figure(plot, ratio_figure(comparison, machine_now()), "svg")
    if as_json:
        print(json.dumps(comparison.to_json(machine_now())))
    else:
        show_comparison(comparison, peers_left_out(choice), Console())
    return 0


def compare_contenders(choice: BenchOptions) -> ContestResult:
    """Measures every cell. Raises ConfigError for a peer that is not installed."""
    shape, names = shape_named(choice.shape), _contenders(choice)
    with tempfile.TemporaryDirectory(prefix="ferryman-bench-") as name, ExitStack() as processes:
        model = BenchModel(Path(name), choice.dtype, choice.threads)
        parameters = make_random_model(shape, choice.dtype, model.folder)
        if LLAMA_CPP in names:
            convert_folder(model.folder, choice.dtype)
        title = f"{choice.shape}, {parameters / 1e6:.1f} M parameters"
        return _contest(title, names, model, choice, processes)


def compare_file(file: Path, choice: BenchOptions) -> ContestResult:
    """Measures a GGUF file in every cell, against llama.cpp."""
    with ExitStack() as processes:
        model = BenchModel(file, choice.dtype, choice.threads)
        return _contest(file.stem, [OURS, LLAMA_CPP], model, choice, processes)


def _contest(
    title: str, names: Sequence[str], model: BenchModel, choice: BenchOptions, processes: ExitStack
) -> ContestResult:
    contenders = [processes.enter_context(contender_process(name, model)) for name in names]
    difference = largest_difference(contenders, choice.dtype)
    results = [_measured(contenders, cell, choice.rounds) for cell in choice.cells]
    return ContestResult(
        title=f"{title}, {choice.dtype}, {choice.threads} threads",
        contenders=tuple(names),
        difference=difference,
        results=tuple(results),
    )


def _contenders(choice: BenchOptions) -> list[str]:
    """Ours, and the peers that are asked for, or those that are installed and know the dtype."""
    unknown = set(choice.peers) - PEERS.keys()
    if unknown:
        raise ConfigError(f"--peers {', '.join(unknown)}: known are {', '.join(PEERS)}")
    installed = [
        name
        for name, package in PEERS.items()
        if importlib.util.find_spec(package) and (name, choice.dtype) not in IMPOSSIBLE
    ]
    return [OURS, *(choice.peers or installed)]


def largest_difference(contenders: Sequence[EngineProcess], dtype: str) -> float:
    """The largest difference of a peer's logits from ours, as a share of the size of ours.

    Raises ConfigError if it is more than rounding: then the models are not the same.
    """
    prompt = [(7 * i + 3) % 1_000 for i in range(PROBE_TOKENS)]
    ours, *others = (one.ask(do="logits", token_ids=prompt)["logits"] for one in contenders)
    found = 0.0
    for contender, theirs in zip(contenders[1:], others, strict=True):
        difference = math.dist(ours, theirs) / math.hypot(*ours)
        # A comparison with NaN is false: it has to pass, not to fail, for a model to be accepted.
        if not difference <= MAX_DIFFERENCE[dtype]:
            raise ConfigError(
                f"{contender.name} runs another model: its logits differ by {difference:.2g} of "
                "their size"
            )
        found = max(found, difference)
    return found


def _measured(contenders: Sequence[EngineProcess], cell: BenchCell, rounds: int) -> CellResult:
    runs = RUNS[cell.kind]
    steps = WARM_UPS[cell.kind] + rounds * (runs + 1)
    for contender in contenders:
        order = {"kind": cell.kind, "requests": cell.requests, "tokens": cell.tokens}
        contender.ask(do="prepare", cell=order, steps=steps)
        contender.ask(do="run", runs=WARM_UPS[cell.kind])
    found: dict[str, list[tuple[float, float]]] = {one.name: [] for one in contenders}
    for number in range(rounds):
        # Every other round goes backwards, so that nobody always comes first.
        for contender in contenders[:: 1 if number % 2 else -1]:
            found[contender.name].append(_round(contender, cell.kind, runs))
    times = {
        name: CellTimes(tuple(wall for wall, _ in each), median(cpu for _, cpu in each))
        for name, each in found.items()
    }
    return CellResult(cell, times)


def _round(contender: EngineProcess, kind: str, runs: int) -> tuple[float, float]:
    """The medians of wall and processor seconds; a first decode step wakes the threads."""
    extra = 1 if kind == "decode" else 0
    timed = contender.ask(do="run", runs=runs + extra)["runs"][extra:]
    return median(wall for wall, _ in timed), median(cpu for _, cpu in timed)


def peers_left_out(choice: BenchOptions) -> Iterator[str]:
    """Says which peers are not compared with, and why."""
    if choice.peers:
        return
    if importlib.util.find_spec(PEERS[LLAMA_CPP]) is None:
        yield "llama.cpp is not installed: pip install 'ferryman[peers]'"
    for name, dtype in IMPOSSIBLE:
        if dtype == choice.dtype:
            yield f"{name} has no {dtype} on a processor"
