"""Cost curves of a simulated engine, measured on a real one or computed from a roofline; they are stored as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhfspec_mega.errors import UserError
from rlhfspec_mega.planning.rollout_state import MigrationCost, Throughput
from rlhfspec_mega.planning.throughput import seconds_per_token

_HOW = "give a file that rlhfspec_mega.simulate.calibrate has made."


@dataclass(frozen=True)
class DecodeCurve:
    """How fast an engine decodes, by batch size.

    Attributes:
        batches: numbers of samples, ascending from 1.
        seconds: in which each sample of such a batch gains one token, without the time of reading the KV cache.
        kv_seconds: additional seconds per token in the KV cache, of all live samples together.
    """

    batches: tuple[int, ...]
    seconds: tuple[float, ...]
    kv_seconds: tuple[float, ...]

    def tables(self, slots: int) -> tuple[list[float], list[float]]:
        """`seconds` and `kv_seconds` by batch from 0 to `slots`, interpolated linearly and continued after the last."""
        batches = np.arange(1, slots + 1)
        seconds = seconds_per_token(Throughput(self.batches, self.seconds), batches)
        return [0.0, *seconds.tolist()], [0.0, *np.interp(batches, self.batches, self.kv_seconds).tolist()]

    def throughput(self, context: float) -> Throughput:
        """The curve as policies see it, for samples with `context` tokens of prompt and response on average."""
        points = zip(self.batches, self.seconds, self.kv_seconds, strict=True)
        return Throughput(self.batches, tuple(seconds + kv * batch * context for batch, seconds, kv in points))


@dataclass(frozen=True)
class MigrationTimes:
    """The time that moving a sample takes.

    Attributes:
        downtime: seconds of stage two, in which no engine decodes the sample.
        copy_seconds: seconds of stage one per token of the sample's KV.
        copy_share: share of both engines' time that stage one takes from decoding; below 1.
    """

    downtime: float
    copy_seconds: float
    copy_share: float

    @property
    def cost(self) -> MigrationCost:
        """The cost as policies see it."""
        return MigrationCost(self.downtime, self.copy_seconds * self.copy_share)


@dataclass(frozen=True)
class CostCurves:
    """The costs of one kind of engine, which has one device.

    Attributes:
        source: origin of the curves ("measured" or "roofline") and all parameters that they were computed from.
        slots: most samples decoded at once.
        kv_tokens: capacity of the KV cache, in tokens of all samples together.
        plain: decoding without a draft.
        drafting: decoding with adaptive drafting; None if it was not measured.
        prefill_seconds: seconds of the engine per prompt token.
        scoring_seconds: seconds of the device per token of prompt and response that the reference scores.
        scoring_start: seconds before a device's first score, in which weights come from host memory.
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
        """The curves as plain data for JSON."""
        return asdict(self)


def read_curves(path: Path) -> CostCurves:
    """Read curves from a JSON file (see `CostCurves.as_json`). Raises UserError if the file is missing or invalid."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"The cost curves in {path} cannot be read ({error.strerror}): give another file.") from None
    except ValueError:
        raise UserError(f"{path} is not a JSON file: {_HOW}") from None
    try:
        return curves_of(data)
    except KeyError as error:
        raise UserError(f"The cost curves in {path} lack {error.args[0]}: {_HOW}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"The cost curves in {path} are invalid ({error}): {_HOW}") from None


def curves_of(data: Mapping[str, Any]) -> CostCurves:
    """Curves from plain data (see `CostCurves.as_json`).

    Raises KeyError if some are missing; TypeError, ValueError or AttributeError if they are invalid.
    """
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
    return curves


def check_curves(curves: CostCurves) -> None:
    """Raise ValueError for values that are impossible."""
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
