"""Writes what docs/verl.md takes for granted: a reader's own command for verl, one step of a tiny model on the CPU.

python tests/e2e/docs_verl_command.py FOLDER writes FOLDER/arguments, FOLDER/environment and the model.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from alignment.rl.verl_run import compose, merge, run_environment

OURS = (
    "VERL_USE_EXTERNAL_MODULES", "ALIGNMENT_VERL_RECORD", "VERL_FILE_LOGGER_PATH", "trainer.logger",
    "trainer.rollout_data_dir", "hydra.run.dir", "actor_rollout_ref.rollout.calculate_log_probs",
)  # fmt: skip
"""What the page has its reader set."""
SMALL = (
    "data.train_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "trainer.total_training_steps=1",
    "trainer.save_freq=-1",
)


def write(folder: Path) -> None:
    folder.mkdir(parents=True)
    settings, _ = compose("dapo-tiny", device="cpu", run_dir=folder.resolve())
    settings = {name: value for name, value in settings.items() if name not in OURS}
    reward = f"reward.custom_reward_function.path={Path(__file__).with_name('verl_reward.py')}"
    # Paths of sockets are short by law.
    ray = f"++ray_kwargs.ray_init._temp_dir={tempfile.mkdtemp(prefix='vr')}"
    (folder / "arguments").write_text("\n".join([*merge(settings, [*SMALL, reward]), ray]) + "\n", encoding="utf-8")
    environment = {k: v for k, v in run_environment(folder, "cpu").items() if k not in OURS}
    lines = [f"export {name}='{value}'\n" for name, value in environment.items()]
    (folder / "environment").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
