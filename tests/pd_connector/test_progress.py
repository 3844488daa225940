"""What a decode engine knows of a named prompt, answer by answer; and answers that do not fit."""

from typing import Any

import msgspec
import pytest

from pd_connector.params import RemoteTransfer, prompt_digest
from pd_connector.progress import Progress, TransferEnded
from tests.support.connector.requests import a_prompt
from transfer.control.messages import Follow, Followed, SlotRange, TransferState

PROMPT = a_prompt(70)
TRANSFER = RemoteTransfer("xfer-1", "10.0.0.5", 8998)
BEGUN = Followed(
    "engine-p", TransferState.COMPUTING, "lease-1", 30.0, 0, 70, prompt_digest(PROMPT, ()), (16, 32), 40,
    ((7, 8, 9), (0, 4)), (0, 0), layers=(("a", "c"), ("b",)), first_tokens=(0, 32),
)  # fmt: skip


def answer(followed: Followed = BEGUN, **changes: Any) -> Followed:
    return msgspec.structs.replace(followed, **changes)


def known(*answers: Followed) -> Progress:
    progress = Progress.of_transfer(TRANSFER)
    for followed in answers:
        progress = progress.after(followed)
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


def test_more_blocks_than_a_prompt_can_have_are_refused() -> None:
    """Else a broken P that tells some more in each answer fills this engine's memory."""
    with pytest.raises(TransferEnded, match="with 5000 blocks of cache group 0, for 70 tokens"):
        known(answer(block_ids=(tuple(range(5000)), (0, 4))))


def test_a_complete_prompt_is_told_whole() -> None:
    whole = ((7, 8, 9, 1, 2), (0, 0, 3))
    progress = known(BEGUN, answer(state=TransferState.COMPLETE, tokens=70, first_blocks=(0, 0), block_ids=whole))
    assert (progress.tokens, progress.is_complete) == (70, True)
    assert progress.remote.remote_block_ids == whole


def test_what_is_told_of_adapters_and_media_is_kept() -> None:
    remote = known(msgspec.structs.replace(BEGUN, adapter_digest="aa", media_digest="bb:cc")).remote
    assert (remote.adapter_digest, remote.media_digest) == ("aa", "bb:cc")


def test_a_question_says_what_is_known() -> None:
    progress = known()
    assert progress.question(2.0) == Follow("", "xfer-1", -1, 0, "unknown", 2.0, -1)
    progress = progress.after(Followed("engine-p", TransferState.QUEUED))
    assert progress.question(-1.0) == Follow("engine-p", "xfer-1", 0, 0, "queued", 0.0, -1)
    progress = progress.after(BEGUN)
    assert progress.question(2.0, reads_host=True) == Follow("engine-p", "xfer-1", 0, 40, "computing", 2.0, 0)
    in_host = SlotRange(0, 64, (0, 0), ((1, 2, 3, 4), (5, 6)))
    assert progress.after(answer(in_host=in_host)).question(2.0, reads_host=True).host_tokens == 64


def test_who_waits_for_the_end_alone_is_told_of_attempts_and_of_no_blocks() -> None:
    waits = known(BEGUN).without_tables()
    assert waits.question(2.0).tokens == 70
    assert waits.after(answer(tokens=64, block_ids=((), ()), first_blocks=(4, 2))) is waits
    queued = waits.after(Followed("engine-p", TransferState.QUEUED, attempt=1)).without_tables()
    assert queued.question(2.0) == Follow("engine-p", "xfer-1", 1, 70, "queued", 2.0)
    again = queued.after(answer(attempt=1, tokens=16, block_ids=((), ()), first_blocks=(4, 2)))
    assert again.question(2.0) == Follow("engine-p", "xfer-1", 1, 70, "computing", 2.0)
    whole = ((7, 8, 9, 1, 2), (0, 0, 3))
    assert again.after(answer(state=TransferState.COMPLETE, attempt=1, block_ids=whole)).is_complete


@pytest.mark.parametrize(
    "late",
    [
        answer(),
        answer(tokens=16, block_ids=((4,), (6,))),
        answer(block_ids=((4, 5, 6), (7, 8))),
        answer(attempt=-1, tokens=64, block_ids=((1, 2, 3, 4), (5, 6))),
        answer(attempt=-1, state=TransferState.COMPLETE, block_ids=((1, 2, 3, 4, 5), (6, 7, 8))),
        Followed("engine-p", TransferState.QUEUED, attempt=-1),
    ],
    ids=["again", "late", "other blocks", "late attempt", "late end", "late queue"],
)
def test_what_is_older_than_what_is_known_changes_nothing(late: Followed) -> None:
    progress = known(BEGUN)
    assert progress.after(late) is progress


def test_a_prompt_that_is_complete_stays_so() -> None:
    progress = known(answer(state=TransferState.COMPLETE, block_ids=((7, 8, 9, 1, 2), (0, 0, 3))))
    assert progress.after(answer(attempt=1)) is progress
    assert progress.after(Followed("engine-p", TransferState.ENDED)) is progress


def test_a_prompt_that_is_queued_again_has_lost_its_blocks_and_keeps_its_lease() -> None:
    queued = known(BEGUN, Followed("engine-p", TransferState.QUEUED, attempt=1))
    assert (queued.state, queued.attempt, queued.tokens) == (TransferState.QUEUED, 1, 0)
    assert (queued.remote.lease_id, queued.remote.remote_block_ids) == ("lease-1", ((), ()))


@pytest.mark.parametrize(
    ("state", "reason", "message"),
    [
        ("ended", "its client has left", "says that transfer xfer-1 at 10.0.0.5:8998 has ended: its client has left"),
        ("ended", "it\nleft", "has ended: it left"),
        ("ended", "", "has ended: it is 'ended'"),
        ("archived", "", "has ended: it is 'archived'"),
        ("unknown", "", "no longer knows transfer xfer-1 at 10.0.0.5:8998, which was computing$"),
        ("unknown", "it has restarted", "which was computing: it has restarted$"),
    ],
)
def test_a_prompt_that_will_not_be_complete_ends_with_the_prefill_engines_reason(
    state: str, reason: str, message: str
) -> None:
    with pytest.raises(TransferEnded, match=message):
        known(BEGUN, Followed("engine-p", state, reason=reason))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine_id": "other"}, "its engine_id is 'other', and was 'engine-p'"),
        ({"lease_id": "other"}, "its lease_id is 'other', and was 'lease-1'"),
        ({"prompt_tokens": 71}, "its num_tokens is 71, and was 70"),
        ({"prompt_digest": "00ff"}, "its prompt_digest is '00ff', and was"),
        ({"block_sizes": (32, 32)}, r"its block_sizes is \(32, 32\), and was \(16, 32\)"),
        ({"layers": (("a",), ("b", "c"))}, "its layers is"),
    ],
)
@pytest.mark.parametrize("later", [{}, {"tokens": 64}, {"attempt": 1}])
def test_an_answer_about_another_prompt_is_an_error(
    later: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    """A name may have been given to two requests."""
    with pytest.raises(TransferEnded, match=f"computes another prompt as transfer xfer-1 .*: {message}"):
        known(BEGUN, answer(**later, **changes))


@pytest.mark.parametrize("untold", [{"prompt_digest": ""}, {"adapter_digest": ""}, {"media_digest": ""}])
def test_what_is_not_told_is_not_compared(untold: dict[str, Any]) -> None:
    begun = answer(adapter_digest="aa", media_digest="bb:cc")
    ids = {"tokens": 64, "first_blocks": (0, 0), "block_ids": ((1, 2, 3, 4), (5, 6))}
    assert known(begun, msgspec.structs.replace(begun, **ids, **untold)).tokens == 64
    assert known(msgspec.structs.replace(begun, **untold), msgspec.structs.replace(begun, **ids)).tokens == 64


def test_another_attempt_counts_for_all_that_was_known_before() -> None:
    again = answer(attempt=1, tokens=16, block_ids=((4,), (6,)))
    assert known(BEGUN, again) == known(again)
    assert known(again).remote.remote_attempt == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": 64, "first_blocks": (4, 1)}, "from block 4 on, and 3 blocks are known"),
        ({"tokens": 64, "first_blocks": (-1, 0)}, "from block -1 on"),
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
        ({"state": TransferState.COMPLETE, "first_blocks": (1, 0)}, r"complete from blocks \(1, 0\) on: .* whole"),
        ({"block_ids": ((1, 2**63), (1,))}, "invalid values: .*remote_block_ids"),
        ({"in_host": SlotRange(0, 32, (0,), ((1, 2),))}, "tokens 0 to 32 in host memory, 1 tables .* 2 of each"),
        ({"in_host": SlotRange(0, 71, (0, 0), ((1,), (2,)))}, "0 to 71 in host memory, .* the prompt has 70 tokens"),
        ({"in_host": SlotRange(32, 32, (0, 0), ((1,), (2,)))}, "32 to 32 in host memory"),
    ],
)
def test_an_answer_that_does_not_fit_is_an_error(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(TransferEnded, match=f"transfer xfer-1 at 10.0.0.5:8998 is announced .*{reason}"):
        known(BEGUN, answer(**changes))


def test_another_number_of_cache_groups_in_the_same_attempt_is_an_error() -> None:
    one_group = answer(block_ids=((1, 2, 3),), first_blocks=(0,), block_sizes=(16,), layers=(), first_tokens=(0,))
    assert known(one_group)
    with pytest.raises(TransferEnded, match="2 each were expected"):
        known(BEGUN, one_group)
