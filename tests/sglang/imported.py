"""What SGLang's processes import; see forked.py."""

from __future__ import annotations

import signal

from rlhfspec_mega.rollout.sglang_engine import cpu_kernels

cpu_kernels.prepare()
signal.signal(signal.SIGQUIT, signal.SIG_IGN)

import sglang.srt.managers.detokenizer_manager  # noqa: E402
import sglang.srt.managers.scheduler  # noqa: E402, F401
