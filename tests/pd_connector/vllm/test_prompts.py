"""What tells prompts apart on two engines: tokens, adapters by what they hold, images by vLLM's hashes of them."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.request import Request

from pd_connector.params import ParamsError, PromptIdentity, RemotePrefill, check_prompt, prompt_digest
from pd_connector.vllm import prompts as prompts_module
from pd_connector.vllm.prompts import Prompts
from tests.support.connector.requests import a_remote

PROMPT = [5, 6, 7, 7, 7, 8]
MODEL = "/models/llava"


def a_request(tokens: list[int] | None = PROMPT, **options: Any) -> Request:
    return Request("r", tokens, SamplingParams(max_tokens=1), None, **options)


def an_image(identifier: str, offset: int = 2, length: int = 3) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        data=None, modality="image", identifier=identifier, mm_position=PlaceholderRange(offset=offset, length=length)
    )


def a_config(model: str = MODEL, cache_gb: float = 4, *, caching: bool = True, algorithm: str = "blake3") -> Any:
    """What of vLLM's configuration decides how images are hashed."""
    media = SimpleNamespace(mm_processor_cache_gb=cache_gb, mm_hasher_algorithm=algorithm)
    return SimpleNamespace(
        model_config=SimpleNamespace(model=model, multimodal_config=media),
        cache_config=SimpleNamespace(enable_prefix_caching=caching),
    )


def answer(prompt: PromptIdentity) -> RemotePrefill:
    """What a prefill engine answers of a prompt."""
    remote = msgspec.structs.replace(
        a_remote([0] * prompt.tokens),
        prompt_digest=prompt.digest,
        adapter_digest=prompt.adapter_digest,
        media_digest=prompt.media_digest,
    )
    return msgspec.convert(json.loads(json.dumps(remote.to_params())), RemotePrefill)


def test_a_text_is_known_by_its_tokens() -> None:
    assert Prompts().identify(a_request()) == PromptIdentity(len(PROMPT), prompt_digest(PROMPT, ()))


# Adapters


def an_adapter(directory: Path, seed: int = 0, **config: Any) -> Path:
    """An adapter of rank 2 in PEFT's form, for the query and value projections of two layers."""
    directory.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    names = [
        f"base_model.model.model.layers.{layer}.self_attn.{part}_proj.lora_{side}.weight"
        for layer in range(2)
        for part in "qv"
        for side in "AB"
    ]
    weights = {name: random.standard_normal((2, 64)).astype(np.float32) for name in names}
    save_file(weights, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 4, "peft_type": "LORA", **config}))
    return directory


def with_adapter(path: Path, number: int = 1, name: str = "french") -> Request:
    return a_request(lora_request=LoRARequest(name, number, str(path)))


def prompts() -> Prompts:
    return Prompts(None, "weights")


def test_one_name_for_two_adapters_is_refused_with_both_values(tmp_path: Path) -> None:
    """P has the new one already, D still the old."""
    theirs = prompts().identify(with_adapter(an_adapter(tmp_path / "p", seed=1)))
    ours = prompts().identify(with_adapter(an_adapter(tmp_path / "d", seed=0)))
    assert theirs.digest == ours.digest
    with pytest.raises(
        ParamsError,
        match=f"'french' is another one on the prefill engine \\(digest {theirs.adapter_digest}\\) than here "
        f"\\({ours.adapter_digest}\\): load the same on both, or roll a new one out under a new name",
    ):
        check_prompt(answer(theirs), ours)


def test_the_same_adapter_is_known_again_wherever_it_lies_and_whatever_its_number(tmp_path: Path) -> None:
    theirs = prompts().identify(with_adapter(an_adapter(tmp_path / "p"), number=7))
    ours = prompts().identify(with_adapter(an_adapter(tmp_path / "d", base_model_name_or_path="elsewhere")))
    assert theirs == ours
    check_prompt(answer(theirs), ours)


def test_another_strength_is_another_adapter(tmp_path: Path) -> None:
    theirs = prompts().identify(with_adapter(an_adapter(tmp_path / "p", lora_alpha=8)))
    ours = prompts().identify(with_adapter(an_adapter(tmp_path / "d")))
    with pytest.raises(ParamsError, match="is another one"):
        check_prompt(answer(theirs), ours)


def test_an_adapter_of_another_name_and_none_at_all_are_other_prompts(tmp_path: Path) -> None:
    path = an_adapter(tmp_path)
    identities = [
        prompts().identify(request) for request in (with_adapter(path), with_adapter(path, name="german"), a_request())
    ]
    assert len({identity.digest for identity in identities}) == 3
    with pytest.raises(ParamsError, match="is not the prompt of this request"):
        check_prompt(answer(identities[0]), identities[2])


def test_an_adapter_is_what_it_held_when_it_was_loaded(tmp_path: Path) -> None:
    """A new one may be written over it, and is not served before vLLM has loaded it again."""
    path = an_adapter(tmp_path)
    known = prompts()
    assert not known.loaded(LoRARequest("french", 1, str(path), load_inplace=True))  # of that number, it is the first
    before = known.identify(with_adapter(path))
    assert before.adapter_digest
    an_adapter(tmp_path, seed=1)
    assert known.identify(with_adapter(path)) == before
    assert not known.loaded(LoRARequest("french", 1, str(path)))  # vLLM keeps what it has
    assert known.identify(with_adapter(path)) == before
    assert known.loaded(LoRARequest("french", 1, str(path), load_inplace=True))
    assert known.identify(with_adapter(path)).adapter_digest not in {before.adapter_digest, ""}


@pytest.mark.parametrize("check", ["weights", "off"])
def test_an_adapter_that_is_loaded_under_a_known_name_takes_the_place_of_another(tmp_path: Path, check: str) -> None:
    """vLLM unloads the old one first, and numbers the new one anew; its path may be the old one's."""
    known, path = Prompts(None, check), str(an_adapter(tmp_path / "a"))
    assert not known.loaded(LoRARequest("french", 1, path))
    assert not known.loaded(LoRARequest("german", 2, path))
    assert not known.loaded(LoRARequest("french", 1, path)), "another process of the API has loaded it as well"
    assert known.loaded(LoRARequest("french", 3, path))
    assert known.loaded(LoRARequest("french", 4, str(an_adapter(tmp_path / "b"))))
    known.identify(with_adapter(tmp_path / "a", number=5, name="of the command line"))
    assert known.loaded(LoRARequest("of the command line", 6, path))


@pytest.mark.parametrize("check", ["config", "off"])
def test_adapters_are_compared_by_name_where_weights_are_not_compared(tmp_path: Path, check: str) -> None:
    theirs = prompts().identify(with_adapter(an_adapter(tmp_path / "p", seed=1)))
    ours = Prompts(None, check).identify(with_adapter(an_adapter(tmp_path / "d")))
    assert ours.adapter_digest == ""
    check_prompt(answer(theirs), ours)


def test_an_adapter_in_another_format_or_place_is_compared_by_name(tmp_path: Path) -> None:
    path = an_adapter(tmp_path / "d")
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    for where in (path, Path("nobody/no-such-adapter-of-these-tests")):
        assert prompts().identify(with_adapter(where)).adapter_digest == ""


# Images and other media


def test_another_image_is_refused_with_both_values() -> None:
    known = Prompts(a_config())
    theirs, ours = (known.identify(a_request(mm_features=[an_image(hash_)])) for hash_ in ("cat", "dog"))
    assert theirs.digest == ours.digest
    with pytest.raises(ParamsError, match=f"digest {theirs.media_digest}\\) are not those .*\\({ours.media_digest}\\)"):
        check_prompt(answer(theirs), ours)
    check_prompt(answer(theirs), theirs)


@pytest.mark.parametrize("other", [[], [an_image("cat", offset=1)], [an_image("cat", length=2)], [an_image("cat")] * 2])
def test_number_and_places_of_images_count(other: list[MultiModalFeatureSpec]) -> None:
    known = Prompts(a_config())
    theirs, ours = (known.identify(a_request(mm_features=images)) for images in ([an_image("cat")], other))
    assert theirs.media_digest != ours.media_digest


def test_another_text_beside_the_same_image_is_refused() -> None:
    known = Prompts(a_config())
    theirs, ours = (
        known.identify(a_request(tokens, mm_features=[an_image("cat")])) for tokens in (PROMPT, [4, *PROMPT[1:]])
    )
    with pytest.raises(ParamsError, match="is not the prompt of this request"):
        check_prompt(answer(theirs), ours)


@pytest.mark.parametrize(
    "other",
    [a_config("/elsewhere/llava"), a_config(algorithm="sha256"), a_config(cache_gb=0, caching=False), None],
    ids=["path", "algorithm", "numbers", "unknown"],
)
def test_images_are_compared_only_between_engines_that_hash_alike(other: Any) -> None:
    """vLLM hashes the path of the model as well, and numbers images if nothing needs their hashes."""
    theirs = Prompts(a_config()).identify(a_request(mm_features=[an_image("cat")]))
    ours = Prompts(other).identify(a_request(mm_features=[an_image("the same cat by another hash")]))
    check_prompt(answer(theirs), ours)
    check_prompt(answer(ours), theirs)


@pytest.mark.parametrize(("cache_gb", "caching"), [(0, True), (4, False)])
def test_one_cache_is_enough_for_vllm_to_hash(cache_gb: float, caching: bool) -> None:
    known = Prompts(a_config(cache_gb=cache_gb, caching=caching))
    assert known.identify(a_request(mm_features=[an_image("cat")])).media_digest


# Embeddings


def embedded(changed: int | None = None) -> Request:
    embeds = torch.arange(6 * 64, dtype=torch.float32).reshape(6, 64).to(torch.bfloat16)
    if changed is not None:
        embeds[changed] += 64
    return a_request(None, prompt_embeds=embeds)


def test_embedded_prompts_are_told_apart_by_any_token() -> None:
    known = Prompts()
    identities = [known.identify(embedded(changed)) for changed in (None, *range(6))]
    assert len({identity.digest for identity in identities}) == 7
    assert known.identify(embedded()) == identities[0]
    assert {identity.tokens for identity in identities} == {6}


# Prompts without their last token


def test_what_drafts_sees_the_token_that_is_left_out_behind_the_others() -> None:
    """As the answer, whatever the client has asked for; its own parameters stay as they are."""
    asked = SamplingParams(max_tokens=9, temperature=0.7, min_tokens=1, stop_token_ids=[7])
    whole, short = Request("r", [5, 6, 7], asked, None), Request("s", [5], asked, None)
    for request in (whole, short):
        Prompts().cut(request, 2, drafts=True)
    assert whole.prompt_token_ids == [5, 6]
    assert (whole.sampling_params.allowed_token_ids, whole.sampling_params.temperature) == ([7], 0.7)
    assert short.sampling_params is asked
    assert (asked.allowed_token_ids, asked.min_tokens, whole.sampling_params.min_tokens) == (None, 1, 0)


def test_a_grammar_rejects_no_token_that_was_left_out() -> None:
    asked = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    request = Request("r", [5, 6, 7], asked, None)
    Prompts().cut(request, 2, drafts=True)
    assert request.prompt_token_ids == [5, 6]
    assert request.sampling_params is asked


def test_what_goes_on_behind_a_prompt() -> None:
    prompts, french = Prompts(), SimpleNamespace(lora_name="french", lora_int_id=1, lora_path="nowhere")
    earlier = prompts.identify(a_request())
    longer, other = [*PROMPT, 7], [9, *PROMPT[1:], 7]
    assert prompts.continues(a_request(longer), earlier)
    assert not prompts.continues(a_request(), earlier)
    assert not prompts.continues(a_request(other), earlier)
    assert not prompts.continues(a_request(longer, lora_request=french), earlier)
    assert not prompts.continues(a_request(longer), None)


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("can't start new thread")])
def test_an_adapter_that_cannot_be_read_now_is_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """Whoever asks for it first would end the engine."""
    adapter = an_adapter(tmp_path / "adapter")

    def fail(*_: object, **__: object) -> None:
        raise error

    if isinstance(error, OSError):
        monkeypatch.setattr(Path, "read_bytes", fail)
    else:
        monkeypatch.setattr(threading.Thread, "start", fail)
    french = SimpleNamespace(lora_name="french", lora_int_id=1, lora_path=str(adapter))
    identity = Prompts(model_check="weights").identify(a_request(lora_request=french))
    assert (identity.adapter, identity.adapter_digest) == ("french", "")
    assert str(error) in caplog.text


def test_adapters_that_nobody_asks_for_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be any number in a server's life."""
    for most in ("_MOST_ADAPTERS", "_MOST_NAMES"):
        monkeypatch.setattr(prompts_module, most, 3)
    read: list[str] = []

    def digest(path: str) -> str:
        read.append(path)
        return path

    monkeypatch.setattr(prompts_module, "_adapter_digest", digest)
    prompts, used = Prompts(model_check="weights"), LoRARequest("used", 1, "used")
    for number in range(2, 9):
        prompts.loaded(LoRARequest(f"other {number}", number, f"other {number}"))
        assert prompts.identify(a_request(lora_request=used)).adapter_digest == "used"
    assert read.count("used") == 1
    assert len(prompts._adapters) == len(prompts._places) == 3
