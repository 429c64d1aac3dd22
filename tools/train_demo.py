"""Train the demo model, or examine one: `python tools/train_demo.py --help`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it runs as a plain script

from tools.demo.folder import save_model  # noqa: E402
from tools.demo.grading import load_network, print_table  # noqa: E402
from tools.demo.init_weights import arrange_weights  # noqa: E402
from tools.demo.network import DemoShape, Network  # noqa: E402
from tools.demo.training import (  # noqa: E402
    TrainingOptions,
    TrainingProgress,
    load_checkpoint,
    make_trainer,
    save_checkpoint,
    saved_tokenizer,
    train,
)
from tools.demo.vocabulary import train_tokenizer  # noqa: E402


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "services/ferryman_cli/demo_model")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--checkpoint", type=Path, default=Path("/tmp/ferryman-demo.pt"))
    parser.add_argument("--talk", type=float, default=0.5, help="share of small-talk steps")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--rate", type=float, default=2e-3, help="the peak of the learning rate")
    parser.add_argument("--start", type=Path, metavar="FOLDER", help="begin with its weights")
    parser.add_argument("--evaluate", type=Path, metavar="FOLDER", help="only print the table")
    parser.add_argument("--papers", type=int, default=200, help="papers an exam")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser.parse_args()


def starting_point(chosen: argparse.Namespace) -> tuple[Tokenizer, Network, TrainingProgress]:
    """Tokenizer and weights to begin with; those of a trained folder know short stories already."""
    if chosen.start is not None:
        tokenizer = Tokenizer.from_file(str(chosen.start / "tokenizer.json"))
        return tokenizer, load_network(chosen.start).train(), TrainingProgress(length=2048)
    tokenizer = saved_tokenizer(chosen.checkpoint) if chosen.resume else train_tokenizer()
    network = Network(DemoShape(vocab=tokenizer.get_vocab_size()))
    arrange_weights(network)
    return tokenizer, network, TrainingProgress()


def train_model(chosen: argparse.Namespace) -> None:
    """Trains, and writes the model folder."""
    torch.manual_seed(7)
    tokenizer, network, progress = starting_point(chosen)
    training = TrainingOptions(
        seconds=chosen.minutes * 60, talk_steps=chosen.talk, peak_rate=chosen.rate
    )
    trainer = make_trainer(network, tokenizer, training)
    if chosen.resume:
        progress = load_checkpoint(chosen.checkpoint, trainer)
    train(trainer, progress, chosen.checkpoint)
    save_checkpoint(chosen.checkpoint, trainer, progress)
    save_model(network, tokenizer, chosen.out)


def main() -> None:
    """Trains or evaluates."""
    chosen = options()
    if chosen.evaluate is None:
        train_model(chosen)
    folder = chosen.evaluate or chosen.out
    print_table(folder, papers=chosen.papers, dtype=getattr(torch, chosen.dtype))


if __name__ == "__main__":
    main()
