"""Train the demo model, or examine one: `python tools/train_demo.py --help`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it runs as a plain script

from tools.demo.beginning import prepare  # noqa: E402
from tools.demo.folder import save_model  # noqa: E402
from tools.demo.marking import print_table  # noqa: E402
from tools.demo.network import Network, Shape  # noqa: E402
from tools.demo.training import (  # noqa: E402
    Course,
    Progress,
    load_checkpoint,
    save_checkpoint,
    saved_tokenizer,
    train,
    tutor,
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
    parser.add_argument("--evaluate", type=Path, metavar="FOLDER", help="only print the table")
    parser.add_argument("--papers", type=int, default=200, help="papers an exam")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser.parse_args()


def teach(chosen: argparse.Namespace) -> None:
    """Train, and write the model folder."""
    torch.manual_seed(7)
    tokenizer = saved_tokenizer(chosen.checkpoint) if chosen.resume else train_tokenizer()
    network = Network(Shape(vocab=tokenizer.get_vocab_size()))
    prepare(network)
    course = Course(seconds=chosen.minutes * 60, talk_steps=chosen.talk)
    teaching = tutor(network, tokenizer, course)
    progress = load_checkpoint(chosen.checkpoint, teaching) if chosen.resume else Progress()
    train(teaching, progress, chosen.checkpoint)
    save_checkpoint(chosen.checkpoint, teaching, progress)
    save_model(network, tokenizer, chosen.out)


def main() -> None:
    """Train or evaluate."""
    chosen = options()
    if chosen.evaluate is None:
        teach(chosen)
    folder = chosen.evaluate or chosen.out
    print_table(folder, papers=chosen.papers, dtype=getattr(torch, chosen.dtype))


if __name__ == "__main__":
    main()
