"""The classes of vLLM that annotations name are there: nothing but a type checker imports them."""

from pd_connector.vllm import types


def test_every_name_is_a_class_of_vllms() -> None:
    for name in types.__all__:
        named = getattr(types, name)
        assert getattr(named, "__module__", "").startswith("vllm."), name
    assert sorted(types.__all__) == sorted(name for name in vars(types) if not name.startswith("_"))
