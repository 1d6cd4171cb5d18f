"""The command: compose the configuration, refuse what cannot run, train. See `python train.py --help`."""

# Worker processes import this file again, so everything heavy is imported where it is used.
from __future__ import annotations

import errno
import gc
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlhfspec_mega.errors import RunError, Stopped, UserError
from rlhfspec_mega.stop import RESUME_STATUS

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from rlhfspec_mega.config.schema.run import RunConfig


def main() -> None:
    """Check names and values of every run first, then hand over to Hydra, which runs `job` once or once per sweep."""
    import hydra

    from rlhfspec_mega.config.names import CONF_DIR, CONFIG_NAME

    gc.disable()  # until all is imported: modules are no garbage
    # Before the first step there is nothing to save: leave at once, so that no process or temporary file stays.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: sys.exit(_say("Terminated.", 128 + number)))
    with errors_in_one_sentence():
        if text := answer_or_check():
            print(text)
            return
    hydra.main(config_path=str(CONF_DIR), config_name=CONFIG_NAME, version_base="1.3")(job)()


def answer_or_check() -> str | None:
    """Answer a command that only asks something, such as --help, and return the answer; else check the command line.

    Raises UserError for a bad command line; that of a sweep before its first run starts.
    """
    from rlhfspec_mega.config.checks import check_config
    from rlhfspec_mega.config.compose import load_config, sweep_jobs
    from rlhfspec_mega.config.describe import explained, help_text
    from rlhfspec_mega.config.flags import parse_flags

    flags = parse_flags(sys.argv[1:])
    if flags.help:
        return help_text()
    if flags.hydra_help or flags.shell_completion or flags.version:
        return None
    jobs = sweep_jobs(flags.overrides) if flags.multirun else [flags.overrides]
    for number, overrides in enumerate(jobs):
        config = load_config(overrides)
        if flags.cfg == "job":
            return explained(config)
        if config.dry_run != "false":
            if flags.multirun:
                raise UserError("dry_run plans one run: leave out --multirun, or dry_run.")
            return planned(config)
        if flags.multirun:
            config.name = numbered(config.name, number)
        if not flags.cfg and not flags.info:
            check_config(config)
    return None


def planned(config: RunConfig) -> str:
    """The plan of a run. Ends with status 2, after printing it, if the run does not fit."""
    from rlhfspec_mega.config.dry_run import dry_run

    text, fits = dry_run(config)
    if not fits:
        print(text)
        sys.exit(2)
    return text


def job(composed: DictConfig) -> None:
    """One run; called by Hydra."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from rlhfspec_mega.config.compose import to_run_config

    with errors_in_one_sentence():
        config = to_run_config(composed)
        hydra_config = HydraConfig.get()
        if hydra_config.mode == RunMode.MULTIRUN:
            config.name = numbered(config.name, hydra_config.job.num)
        train(config, list(hydra_config.overrides.task))


def numbered(name: str, number: int) -> str:
    """Name of one run of a sweep."""
    return f"{name}_{number}"


def train(config: RunConfig, overrides: list[str]) -> None:
    """Reserve the run's directory and train; a run that is refused before its workers start leaves no directory."""
    from rlhfspec_mega.config.output_dir import claimed_output_dir

    with claimed_output_dir(config, overrides):
        if config.task in ("sft", "reward_model"):
            from rlhfspec_mega.supervised import run
        elif config.task == "evaluate":
            from rlhfspec_mega.evaluation import run
        else:
            from rlhfspec_mega.trainer import run
        gc.freeze()
        gc.enable()
        run(config)


@contextmanager
def errors_in_one_sentence() -> Iterator[None]:
    """Exit status: 2 for bad input, 1 for a run that cannot go on, 75 for one that can be resumed, 130 on Ctrl-C."""
    from rlhfspec_mega.config.compose import NoPresetError

    try:
        yield
    except NoPresetError as error:
        from rlhfspec_mega.config.advice import unplanned, with_advice

        if error.config.dry_run == "json":
            print(json.dumps(unplanned(error)))
        sys.exit(_say(with_advice(error), 2))
    except UserError as error:
        sys.exit(_say(error, 2))
    except RunError as error:
        sys.exit(_say(error, 1))
    except Stopped as stopped:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is saved: another Ctrl-C must not end in a trace
        sys.exit(_say(stopped, RESUME_STATUS))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = error.filename or "a file of the run"
        sys.exit(_say(f"{error.strerror} while writing {where}: free some, then go on with trainer.resume=true.", 1))
    except KeyboardInterrupt:
        sys.exit(_say("Interrupted.", 130))


def _say(message: object, status: int) -> int:
    print(message, file=sys.stderr)
    return status


if __name__ == "__main__":
    main()
