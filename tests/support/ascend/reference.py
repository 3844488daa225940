"""What Hugging Face Transformers says on the CPU, in float32. Tokens only, one list a prompt.

As a program, in the environment of the tests: ``python -m tests.support.ascend.reference MODEL``; prompts and answers
are JSON on standard input and output.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.ascend.paths import ROOT_OF_PROJECT
from tests.support.ascend.servers import simulated_environment


def transformers_answers(model: Path, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Greedy answers of the model in a directory, computed in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(model)],
        input=json.dumps({"prompts": prompts, "max_tokens": max_tokens}),
        env={**os.environ, **dict(simulated_environment()), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True, text=True, check=False, cwd=ROOT_OF_PROJECT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def main(model_path: str) -> None:
    """Answer the prompts on standard input."""
    import torch  # noqa: PLC0415  in the process that was started for it only
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    asked = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    answers = []
    for prompt in asked["prompts"]:
        with torch.inference_mode():
            whole = model.generate(
                torch.tensor([prompt]), max_new_tokens=asked["max_tokens"], do_sample=False, eos_token_id=None
            )
        answers.append(whole[0, len(prompt) :].tolist())
    sys.stdout.write(f"\n{json.dumps(answers)}\n")


if __name__ == "__main__":
    main(sys.argv[1])
