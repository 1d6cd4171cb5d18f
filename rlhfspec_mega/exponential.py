"""exp for compiled loops over float32, which the compiler turns into SIMD instructions; that of libm stays scalar."""

from __future__ import annotations

import numpy as np

from rlhfspec_mega.compiled import inlined

_LEAST = np.float32(-87.0)  # below it the result would be denormal
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_C0, _C1, _C2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_C3, _C4, _C5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)
_HALF, _ONE = np.float32(0.5), np.float32(1.0)


@inlined
def exponential(x: np.float32) -> np.float32:
    """exp(x) for float32 x <= 0, with a relative error below 3e-7; exp(-87), 1.6e-38, for smaller ones.

    x = k ln 2 + r with |r| <= ln(2) / 2; exp(r) is the polynomial of the Cephes library (Moshier 1989), and 2^k is put
    together from its bits.
    """
    x = max(x, _LEAST)
    k = np.floor(x * _LOG2_E + _HALF)
    r = x - k * _LN2_HIGH - k * _LN2_LOW
    p = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
    power = np.int32((np.int32(k) + np.int32(127)) << np.int32(23))
    return (p * r * r + r + _ONE) * power.view(np.float32)
