"""Writes the embedded RL prompts to baselines/data/, in verl's parquet format and as token ids.

Both hold the same prompts: a machine that has neither pyarrow, reasoning-gym nor tokenizers trains and scores from the
token ids. Run it again whenever the tasks or the checkpoint's tokenizer change; the same versions write the same bytes.

    python scripts/make_rl_data.py
"""

from __future__ import annotations

import argparse
from importlib.metadata import version
from pathlib import Path

from alignment.files import write_json
from alignment.rl.data import from_questions, write_parquet
from alignment.rl.tasks import EMBEDDED_TASKS, SPLITS, generate_mixture, verl_rows
from alignment.rl.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
TOKENIZER = ROOT / "baselines" / "checkpoints" / "tiny-moonlight-warm"
DATA = ROOT / "baselines" / "data"

COUNTS = {"rl": 2400, "held_out": 400}
SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER)
    parser.add_argument("--out", type=Path, default=DATA)
    arguments = parser.parse_args()

    tokenizer = Tokenizer(arguments.tokenizer)
    sets = {}
    for split, count in COUNTS.items():
        questions = generate_mixture(EMBEDDED_TASKS, count, seed=SEED, split=split)
        prompts = from_questions(questions, tokenizer)
        prompts.save(arguments.out / split)
        sets[split] = {
            "prompts": len(prompts),
            "longest": prompts.max_length,
            "content_hash": prompts.content_hash,
            "by_source": {t.data_source: sum(p.data_source == t.data_source for p in prompts) for t in EMBEDDED_TASKS},
        }
        write_parquet(verl_rows(questions, split=split), arguments.out / f"{split}.parquet")
    write_json(
        arguments.out / "manifest.json",
        {
            "sets": sets,
            "seed": SEED,
            "splits": {name: list(percent) for name, percent in SPLITS.items()},
            "tasks": [{"name": t.name, "config": dict(t.config), "share": t.share} for t in EMBEDDED_TASKS],
            "tokenizer_hash": tokenizer.content_hash,
            "versions": {name: version(name) for name in ("reasoning-gym", "tokenizers")},
        },
    )


if __name__ == "__main__":
    main()
