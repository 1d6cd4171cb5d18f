"""What everything takes on a simulated engine, as measured on a real one or computed from a roofline; kept as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.planning.rollout_state import MigrationCost, Throughput
from rlhfspec_mega.planning.throughput import seconds_per_token

_HOW = "take those that rlhfspec_mega.simulate.calibrate makes."


@dataclass(frozen=True)
class DecodeCurve:
    """How fast an engine decodes.

    Attributes:
        batches: ascending, from 1.
        seconds: in which each of so many samples gains one token, reading the KV cache aside.
        kv_seconds: more for each token that is in the engine's KV cache, of all its live samples together.
    """

    batches: tuple[int, ...]
    seconds: tuple[float, ...]
    kv_seconds: tuple[float, ...]

    def tables(self, slots: int) -> tuple[list[float], list[float]]:
        """`seconds` and `kv_seconds` by batch, 0 to `slots`: straight between the points, and on beyond the last."""
        batches = np.arange(1, slots + 1)
        seconds = seconds_per_token(Throughput(self.batches, self.seconds), batches)
        return [0.0, *seconds.tolist()], [0.0, *np.interp(batches, self.batches, self.kv_seconds).tolist()]

    def throughput(self, context: float) -> Throughput:
        """What policies see of it, for samples of so many tokens (prompt and response) on average."""
        points = zip(self.batches, self.seconds, self.kv_seconds, strict=True)
        return Throughput(self.batches, tuple(seconds + kv * batch * context for batch, seconds, kv in points))


@dataclass(frozen=True)
class MigrationTimes:
    """What moving a sample takes.

    Attributes:
        downtime: seconds of stage two, in which the sample is decoded nowhere.
        copy_seconds: of stage one, per token in the sample's KV.
        copy_share: of both engines' time that a stage one takes from their decoding; below 1.
    """

    downtime: float
    copy_seconds: float
    copy_share: float

    @property
    def cost(self) -> MigrationCost:
        """What policies see of it."""
        return MigrationCost(self.downtime, self.copy_seconds * self.copy_share)


@dataclass(frozen=True)
class CostCurves:
    """One kind of engine; a device each.

    Attributes:
        source: where the figures come from ("measured" or "roofline") and all parameters they were computed from.
        slots: samples decoded at once.
        kv_tokens: room in the KV cache, in tokens of all samples together.
        plain: decoding without a draft.
        drafting: with adaptive drafting; None where it was not measured.
        prefill_seconds: of the engine's time, per prompt token.
        scoring_seconds: of the device's time, per token of prompt and response that the reference scores.
        scoring_start: seconds before a device's first score (weights come from host memory).
    """

    name: str
    source: dict[str, Any]
    slots: int
    kv_tokens: int
    plain: DecodeCurve
    drafting: DecodeCurve | None
    prefill_seconds: float
    scoring_seconds: float
    scoring_start: float
    migration: MigrationTimes

    def as_json(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def read_curves(path: Path) -> CostCurves:
    """Curves that were saved as JSON (`CostCurves.as_json`). Raises UserError, naming what is wrong, for others."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"The cost curves in {path} cannot be read ({error.strerror}): give another file.") from None
    except ValueError:
        raise UserError(f"{path} holds no JSON: {_HOW}") from None
    try:
        curves = CostCurves(
            name=str(data["name"]),
            source=dict(data["source"]),
            slots=int(data["slots"]),
            kv_tokens=int(data["kv_tokens"]),
            plain=_decode_curve(data["plain"]),
            drafting=None if data["drafting"] is None else _decode_curve(data["drafting"]),
            prefill_seconds=float(data["prefill_seconds"]),
            scoring_seconds=float(data["scoring_seconds"]),
            scoring_start=float(data["scoring_start"]),
            migration=MigrationTimes(**{name: float(value) for name, value in data["migration"].items()}),
        )
        check_curves(curves)
    except KeyError as error:
        raise UserError(f"The cost curves in {path} lack {error.args[0]}: {_HOW}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"The cost curves in {path} are of no use ({error}): {_HOW}") from None
    return curves


def check_curves(curves: CostCurves) -> None:
    """Raise ValueError for values that no engine can have."""
    for curve in (curves.plain, curves.drafting):
        if curve is not None:
            _check_decode(curve)
    times = (curves.prefill_seconds, curves.scoring_seconds, curves.scoring_start)
    moving = curves.migration
    if not all(math.isfinite(value) and value >= 0 for value in (*times, moving.downtime, moving.copy_seconds)):
        raise ValueError("all times must be 0 or more")
    if not 0 <= moving.copy_share < 1:
        raise ValueError("copy_share must be 0 or more and below 1")
    if min(curves.slots, curves.kv_tokens) < 1:
        raise ValueError("slots and kv_tokens must be 1 or more")


def _decode_curve(data: dict[str, Any]) -> DecodeCurve:
    batches = tuple(int(value) for value in data["batches"])
    seconds, kv_seconds = (tuple(float(value) for value in data[name]) for name in ("seconds", "kv_seconds"))
    return DecodeCurve(batches, seconds, kv_seconds)


def _check_decode(curve: DecodeCurve) -> None:
    if not len(curve.batches) == len(curve.seconds) == len(curve.kv_seconds) > 0:
        raise ValueError("a decode curve needs as many seconds and kv_seconds as batches, at least one")
    if curve.batches[0] != 1 or any(b <= a for a, b in zip(curve.batches, curve.batches[1:], strict=False)):
        raise ValueError("the batches of a decode curve must ascend from 1")
    if not all(math.isfinite(value) and value > 0 for value in curve.seconds):
        raise ValueError("the seconds of a decode curve must be above 0")
    if not all(math.isfinite(value) and value >= 0 for value in curve.kv_seconds):
        raise ValueError("kv_seconds must be 0 or more")
