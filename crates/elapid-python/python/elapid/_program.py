"""What the program `elapid` does for Python: a project adapted with a proof, names of models."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _native

if TYPE_CHECKING:
    from . import _model


def _error(problem: str, hint: str) -> _native.Error:
    error = _native.Error(problem)
    error.hint = hint
    error.add_note(f"hint: {hint}")
    return error


def program() -> str:
    """Where the program is: beside this Python, where the wheel puts it, or on the PATH."""
    places = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    found = shutil.which("elapid", path=places)
    if found is None:
        raise _error("the program `elapid` is not installed", "put it on the PATH")
    return found


def _failure(stdout: str, stderr: str) -> _native.Error:
    """The error among the objects that the program printed."""
    for line in reversed(stdout.splitlines()):
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if isinstance(said, dict) and said.get("kind") == "error":
            return _error(said["error"], said["hint"])
    return _error(stderr.strip() or "elapid ended without a word", "run it in a terminal")


def model_path(model: _model.Path) -> _model.Path:
    """The path of a model, or what the program knows under this name."""
    name = os.fspath(model)
    is_name = name == "elapid-code" or (name.count("/") == 1 and not name.startswith((".", "/")))
    if os.path.exists(name) or not is_name:
        return model
    done = subprocess.run([program(), "info", name, "--json"], capture_output=True, text=True)
    if done.returncode != 0:
        raise _failure(done.stdout, done.stderr)
    return str(json.loads(done.stdout)["path"])


@dataclass(frozen=True)
class Adapted:
    """What a project was taught, and how well."""

    #: Folder of the run: `elapid.load` opens it.
    path: Path
    #: "better", "worse", "no difference" or "too little to tell"
    verdict: str
    #: Bits per byte of the held-out text.
    before: float
    after: float
    #: What the certificate says.
    certificate: dict[str, Any]


def adapt(
    project: _model.Path = ".",
    *,
    model: _model.Path | None = None,
    minutes: float | None = None,
    steps: int | None = None,
    on_event: Callable[[dict[str, Any]], object] | None = None,
    **flags: Any,
) -> Adapted | None:
    """Adapts a model to a project and proves that it got better, as `elapid adapt` does; none where
    nothing is new since the last time.

    `on_event` hears of every line of the program: `kind` is `step`, `eval`, `result` ... Further
    arguments are its flags: `method="lora"`, `rank=8`, `fresh=True`.
    """
    given = {"model": model, "minutes": minutes, "steps": steps, **flags}
    words = [program(), "adapt", os.fspath(project), "--json"]
    for name, value in given.items():
        if value is None or value is False:
            continue
        words.append("--" + name.replace("_", "-"))
        if value is not True:
            words.append(os.fspath(value) if isinstance(value, os.PathLike) else str(value))
    said = []
    certificate: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True) as run:
            assert run.stdout is not None
            for line in run.stdout:
                said.append(line)
                event = json.loads(line)
                if event.get("kind") == "certificate":
                    certificate = event
                if on_event is not None:
                    on_event(event)
        # 3 is for a model that is not better.
        if run.returncode not in (0, 3):
            errors.seek(0)
            raise _failure("".join(said), errors.read())
    if not certificate:
        return None
    path = Path(certificate["path"])
    bits = certificate["bits_per_byte"]
    return Adapted(
        path.parent, certificate["verdict"], bits["before"], bits["after"],
        json.loads(path.read_text(encoding="utf-8")),
    )
