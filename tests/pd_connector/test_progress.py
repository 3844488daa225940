"""What a decode engine knows of a named prompt, answer by answer; and answers that do not fit."""

from typing import Any

import msgspec
import pytest

from pd_connector.params import RemoteTransfer, prompt_digest
from pd_connector.progress import BadProgressError, Progress, progress_of
from tests.support.connector.requests import a_prompt
from transfer.control.messages import Followed, TransferState

PROMPT = a_prompt(70)
TRANSFER = RemoteTransfer("xfer-1", "10.0.0.5", 8998)
BEGUN = Followed(
    "engine-p", TransferState.COMPUTING, "lease-1", 30.0, 0, 70, prompt_digest(PROMPT, ()), (16, 32), 40,
    ((7, 8, 9), (0, 4)), (0, 0), layers=(("a", "c"), ("b",)), first_tokens=(0, 32),
)  # fmt: skip


def answer(followed: Followed = BEGUN, **changes: Any) -> Followed:
    return msgspec.structs.replace(followed, **changes)


def known(*answers: Followed) -> Progress:
    progress = None
    for followed in answers:
        progress = progress_of(TRANSFER, followed, progress)
    assert progress is not None
    return progress


def test_the_first_answer_tells_how_to_read_what_is_complete() -> None:
    progress = known(BEGUN)
    assert (progress.tokens, progress.is_complete, progress.first_tokens) == (40, False, (0, 32))
    remote = progress.remote
    assert (remote.remote_engine_id, remote.remote_host, remote.remote_port) == ("engine-p", "10.0.0.5", 8998)
    assert (remote.lease_id, remote.lease_ttl_s, remote.remote_attempt) == ("lease-1", 30.0, 0)
    assert (remote.remote_num_tokens, remote.prompt_digest) == (70, BEGUN.prompt_digest)
    assert (remote.remote_block_ids, remote.remote_block_sizes) == (((7, 8, 9), (0, 4)), (16, 32))
    assert remote.remote_layers == (("a", "c"), ("b",))


def test_a_later_answer_goes_on_where_the_known_table_ends_or_replaces_its_end() -> None:
    progress = known(BEGUN, answer(tokens=64, first_blocks=(2, 1), block_ids=((5, 6), (3,))))
    assert progress.tokens == 64
    assert progress.remote.remote_block_ids == ((7, 8, 5, 6), (0, 3))


def test_a_complete_prompt_is_told_whole() -> None:
    whole = ((7, 8, 9, 1, 2), (0, 0, 3))
    progress = known(BEGUN, answer(state=TransferState.COMPLETE, tokens=70, first_blocks=(0, 0), block_ids=whole))
    assert (progress.tokens, progress.is_complete) == (70, True)
    assert progress.remote.remote_block_ids == whole


def test_what_is_told_of_adapters_and_media_is_kept() -> None:
    remote = known(msgspec.structs.replace(BEGUN, adapter_digest="aa", media_digest="bb:cc")).remote
    assert (remote.adapter_digest, remote.media_digest) == ("aa", "bb:cc")


def test_another_attempt_counts_for_all_that_was_known_before() -> None:
    again = answer(attempt=1, tokens=16, block_ids=((4,), (6,)))
    assert known(BEGUN, again) == known(again)
    assert known(again).remote.remote_attempt == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"first_blocks": (4, 1)}, "from block 4 on, and 3 blocks are known"),
        ({"first_blocks": (-1, 0)}, "from block -1 on"),
        ({"first_blocks": (0,)}, "2 block tables, 1 beginnings"),
        ({"block_ids": ((1,),)}, "1 block tables, 2 beginnings"),
        ({"block_sizes": (16,)}, "1 block sizes; 2 each"),
        ({"layers": (("a",),)}, "invalid values: remote_layers is of 1 cache groups, and remote_block_ids has 2"),
        ({"layers": ()}, "remote_layers does not say which layers each is of: .*older .* same version on both sides"),
        ({"layers": (("a", ""), ("b",))}, "invalid values: .*remote_layers"),
        ({"first_tokens": (0,)}, "first tokens of 1 cache groups; 2 were expected"),
        ({"block_sizes": (16, 0)}, "invalid values: .*remote_block_sizes"),
        ({"block_ids": ((1, 2, -3), (1, 2))}, "invalid values: .*remote_block_ids"),
        ({"lease_id": ""}, "invalid values: .*lease_id"),
        ({"lease_ttl_s": 0.0}, "invalid values: .*lease_ttl_s"),
        ({"engine_id": ""}, "invalid values: .*remote_engine_id"),
        ({"prompt_tokens": 0}, "invalid values: .*remote_num_tokens"),
        ({"prompt_digest": "nonsense"}, "invalid values: .*prompt_digest"),
        ({"attempt": 1, "first_blocks": (3, 2)}, "from block 3 on, and 0 blocks are known"),
        ({"tokens": 71}, "71 complete tokens of 70"),
        ({"tokens": 64}, "64 complete tokens, and cache group 0 has 3 blocks of 16 tokens"),
        ({"state": TransferState.COMPLETE}, "70 complete tokens, and cache group 0 has 3 blocks"),
    ],
)
def test_an_answer_that_does_not_fit_is_an_error(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadProgressError, match=f"transfer xfer-1 at 10.0.0.5:8998 is announced .*{reason}"):
        known(BEGUN, answer(**changes))


def test_another_number_of_cache_groups_in_the_same_attempt_is_an_error() -> None:
    one_group = answer(block_ids=((1, 2, 3),), first_blocks=(0,), block_sizes=(16,), layers=(), first_tokens=(0,))
    assert known(one_group)
    with pytest.raises(BadProgressError, match="2 each were expected"):
        known(BEGUN, one_group)
