"""Verifies a run's checkpoint before its weights are used outside the run, where no worker has verified it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rlhfspec_mega.checkpoints.manifest import MANIFEST_FILE, BadCheckpoint, Manifest
from rlhfspec_mega.checkpoints.saving import ACTOR
from rlhfspec_mega.errors import UserError
from rlhfspec_mega.megatron.checkpoint_files import first_damage


def require_intact(checkpoint: Path) -> None:
    """Refuse a run's checkpoint that is damaged; one without a manifest, such as Megatron-LM's, cannot be verified.

    Torch's reader compares no checksum, so a changed byte would be a changed weight. The whole checkpoint is read: its
    files hold blocks of weights and of the optimizer in any order.

    Args:
        checkpoint: directory of the Megatron distributed checkpoint; a run's is RUN/checkpoints/step_N/actor.

    Raises:
        UserError: names the first file that is missing, or has another size or CRC-32 than the manifest says.
    """
    actual = checkpoint.resolve()
    directory = actual.parent
    if actual.name != ACTOR or not (directory / MANIFEST_FILE).exists():
        return
    try:
        manifest = Manifest.read(directory)
        manifest.check_sizes(directory)
        with ThreadPoolExecutor() as threads:  # reading and summing let go of the interpreter's lock
            damages = threads.map(lambda file: first_damage(directory, dict([file])), manifest.files.items())
            damage = next((damage for damage in damages if damage is not None), None)
        if damage is not None:
            raise BadCheckpoint(damage)
    except BadCheckpoint as error:
        raise UserError(
            f"{directory} cannot be used: {error}: name another checkpoint, or put back a good copy."
        ) from None
