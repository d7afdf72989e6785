"""How every command ends: its exit codes, and one sentence for each mistake on the command line."""

import difflib
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from dml.configuration.composition import CONF
from dml.errors import CTRL_C, INTERRUPTED, UNREAD, Interrupted, Unfaithful, UserError, stop


@contextmanager
def ending(files: bool = True) -> Iterator[None]:
    """Ends a command with the exit codes of `dml.errors`, and with one sentence for what the user can put right.

    It can be used as a context or as a decorator of `main`. Other exceptions are faults of the code and pass with their
    traceback.

    Args:
        files: an `OSError` is about a file that the user named, and is told in one sentence. False, as for trainings:
            it passes with its traceback.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # as stderr: names of files may hold bytes that are not text
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                _flush()  # here, since a closed pipe is caught quietly below
    except UserError as mistake:
        stop(str(mistake))
    except Unfaithful as sentence:
        print(f"dml: {sentence}", file=sys.stderr)
        raise SystemExit(1) from None
    except (ConfigCompositionException, OverrideParseException) as mistake:
        stop(hydra_sentence(mistake))
    except Interrupted as told:
        if str(told):
            print(f"dml: Stopped by {told}; run the same line again to continue.", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except KeyboardInterrupt:
        raise SystemExit(CTRL_C) from None
    except (BrokenPipeError, SystemExit) as left:
        by_rich = isinstance(left.__context__, BrokenPipeError)  # rich then exits with 1 and discards its output
        if not by_rich and not _nobody_reads():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter flushes once more at its end
        raise SystemExit(UNREAD if by_rich or isinstance(left, BrokenPipeError) else left.code) from None
    except OSError as error:
        if not files:
            raise
        where = error.filename or "A file or the standard output"
        stop(f"{where} cannot be written or read ({error.strerror or error}).")


def _flush() -> None:
    """Flushes the standard output. Its errors, but for a closed pipe, name it."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, "The standard output") from error


def _nobody_reads() -> bool:
    """Says whether the other end of the pipe that this process prints to is closed."""
    if not hasattr(select, "poll"):  # on Windows
        return False
    asked = select.poll()
    asked.register(1, select.POLLOUT)
    return any(event & (select.POLLERR | select.POLLHUP | select.POLLNVAL) for _, event in asked.poll(0))


def hydra_sentence(error: Exception) -> str:
    """Puts what Hydra says of a command line into one sentence; for an unknown name it proposes similar ones."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        near = difflib.get_close_matches(choice.lower(), error.options, n=5, cutoff=0.5)
        remedy = f"did you mean {', '.join(near)}? --help lists all" if near else f"choose {', '.join(error.options)}"
        return f"{group}={choice} is unknown: {remedy}."
    where = error.__cause__
    if isinstance(where, ConfigKeyError | ConfigAttributeError) and str(error).startswith("Could not override"):
        return _unknown(where)
    if isinstance(error, OverrideParseException) and (quoted := _quoted(str(error.override))):
        return f"{error.override} cannot be read: Hydra takes few characters without quotes, so write {quoted}."
    said = [" ".join(str(error).split()) or type(error).__name__]
    if is_group_nameless(error):
        return "A group of options takes the name of one of its files, as in dataset=glyphs (--help lists them)."
    if error.__cause__ is not None and str(error.__cause__).strip():
        said.append(f"({str(error.__cause__).strip().splitlines()[0]})")
    if "does not support sweep type" in said[0]:
        said.append("- to sweep over such a range, set hydra/sweeper=optuna")
    return " ".join(said).rstrip(".?") + "."


def is_group_nameless(error: Exception) -> bool:
    """Says whether Hydra could not compose because a group was set to no name, as in `dataset=null` or `method=3`."""
    return isinstance(error, ValueError) and str(error).startswith("Config group override must be")


def _quoted(override: str) -> str:
    """Returns an override as it is typed with its value in quotes; empty if its value was to be more than a word. `~`
    becomes the home folder, since after `name=` the shell leaves it as it is."""
    name, _, value = override.partition("=")
    value = os.path.expanduser(value)
    if not value or any(sign in value for sign in "'\"[]{}()$,"):
        return ""
    return f"\"{name}='{value}'\""


def _unknown(error: OmegaConfBaseException) -> str:
    """Returns the sentence for an option that the configuration does not have."""
    place, _, name = str(error.full_key).rpartition(".")
    known = {str(option) for option in error.parent_node or () if not str(option).startswith("_")} - {"hydra"}
    if not place:
        known |= {folder.name for folder in CONF.iterdir() if folder.is_dir()}
    before = f"{place}." if place else ""
    near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6)
    if near:
        return f"{before}{name} is no option: did you mean {' or '.join(before + one for one in near)}?"
    added = f"; add an option that its file leaves out with +{before}{name}=..." if place or name == "note" else ""
    return f"{before}{name} is no option: choose among {', '.join(sorted(known)) or 'none'}{added}."
