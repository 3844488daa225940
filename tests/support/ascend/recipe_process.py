"""Processes in which engines of recipes are made, one for each generation of devices: a fork of it for each task.

Importing vLLM and vllm-ascend takes longer than any task, and a process has one generation from its first import on.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.ascend.paths import ROOT_OF_PROJECT
from tests.support.ascend.recipes import Hardware, Recipe, all_recipes
from tests.support.ascend.servers import simulated_environment

_START = """
import sys
from tests.support.ascend.device_generation import build_for
build_for(sys.argv[1])
from tests.support.ascend.host_kernels import plugin
plugin.register()
from tests.support.ascend.recipe_process import serve_tasks
serve_tasks(int(sys.argv[2]))
"""
_TASKS = "tests.support.ascend.recipe_tasks"
_TASK_TIMEOUT_S = 600.0


class RecipeProcess:
    """One such process, seen from a test."""

    def __init__(self, hardware: Hardware) -> None:
        answers, theirs = os.pipe()
        self._answers = os.fdopen(answers)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by ``close``
        environment = {**os.environ, **dict(simulated_environment())}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _START, hardware, str(theirs)],
            stdin=subprocess.PIPE, stdout=self._log, stderr=self._log, pass_fds=(theirs,), env=environment,
            cwd=ROOT_OF_PROJECT, text=True,
        )  # fmt: skip
        os.close(theirs)

    def run(self, task: str, recipe: Recipe) -> Any:
        """Return what a function of ``recipe_tasks`` returns for a recipe.

        Raises:
            AssertionError: it raised; the message has its traceback.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{task} {recipe.name}\n")
        self._process.stdin.flush()
        line = self._answers.readline()
        assert line, f"the process has ended:\n{self._output()}"
        answer = json.loads(line)
        assert "raised" not in answer, answer["raised"]
        return answer["returned"]

    def close(self) -> None:
        """End the process."""
        with suppress(BrokenPipeError):
            self._process.communicate(timeout=_TASK_TIMEOUT_S)
        self._answers.close()
        self._log.close()

    def _output(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-4000:]


def serve_tasks(answers: int) -> None:
    """Do the tasks that standard input names, line by line, until it ends."""
    tasks, recipes = importlib.import_module(_TASKS), all_recipes()
    tasks.prepare()
    for line in sys.stdin:
        task, name = line.split()
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            if status:
                _answer(answers, {"raised": f"{task} of {name} ended its process with status {status}"})
            continue
        try:
            with tempfile.TemporaryDirectory() as directory:
                answer = {"returned": getattr(tasks, task)(recipes[name], Path(directory))}
        except Exception:
            answer = {"raised": traceback.format_exc()}
        _answer(answers, answer)
        os._exit(0)


def _answer(answers: int, answer: dict[str, Any]) -> None:
    os.write(answers, (json.dumps(answer) + "\n").encode())
