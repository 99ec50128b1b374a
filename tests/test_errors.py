"""The error tree and the text of an error: what, expected, got, one line per rank, what to do."""

from __future__ import annotations

import email.message
import inspect
import pickle

import pytest

from lightning_ddp_losses import errors
from lightning_ddp_losses.errors import (
    DDPLossError,
    PeerError,
    error_class,
    explained_by,
    format_error,
    manual_address,
    register_error,
)
from tests.doors import _refuse_other_items, messages, refuse_other_upstream_grads

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, DDPLossError)]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_hangs_under_one_root(cls: type[DDPLossError]) -> None:
    assert issubclass(cls, DDPLossError)
    assert issubclass(cls, RuntimeError)
    assert cls.__doc__
    error = cls("text", findings=[1], collective=True)
    assert (str(error), error.findings, error.collective) == ("text", [1], True)
    assert (cls("text").findings, cls("text").collective) == ([], False)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_error_survives_pickle(cls: type[DDPLossError]) -> None:
    again = pickle.loads(pickle.dumps(cls("text", findings=["f"], collective=True)))
    assert type(again) is cls
    assert (str(again), again.findings, again.collective) == ("text", ["f"], True)


def test_the_parts_of_an_error_survive_pickle() -> None:
    """Plain values and shapes as they are, other objects as text; what belongs to this process alone stays behind."""
    error = DDPLossError("loss.W", expected=(8, 4), got=lambda: 0, ranks=["a", {2}], fix="Do it.")
    error.reported_in = (frame for frame in ())  # type: ignore[attr-defined]  # as little to be pickled as a process group
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert (again.what, again.expected, again.got, again.fix) == ("loss.W", (8, 4), str(error.got), "Do it.")
    assert again.ranks == {0: "a", 1: "{2}"}
    assert not hasattr(again, "reported_in")


def test_each_class_can_be_raised_by_peers_under_its_name() -> None:
    assert [error_class(cls.__name__) for cls in CLASSES] == CLASSES
    assert error_class("ValueError") is PeerError

    @register_error
    class OurOwnError(DDPLossError):
        pass

    assert error_class("OurOwnError") is OurOwnError


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "loss.W"),
        ({"expected": "(8, 4)"}, "loss.W: expected (8, 4)"),
        ({"expected": "(8, 4)", "got": "(8, 5)"}, "loss.W: expected (8, 4), got (8, 5)"),
        ({"expected": 0, "got": ""}, "loss.W: expected 0, got "),
        ({"ranks": ["a", "b"]}, "loss.W\n  rank 0: a\n  rank 1: b"),
        ({"ranks": {2: "a"}, "fix": "Do it."}, "loss.W\n  rank 2: a\nDo it."),
    ],
)
def test_text_of_an_error(arguments: dict[str, object], text: str) -> None:
    assert format_error("loss.W", **arguments) == text  # type: ignore[arg-type]
    error = DDPLossError("loss.W", **arguments)  # type: ignore[arg-type]
    assert str(error) == text
    assert {name: getattr(error, name) for name in arguments} == arguments


def test_an_error_of_a_known_fault_names_its_page_and_keeps_it_in_a_pickle() -> None:
    error = errors.HiddenLossError("self.losses[0]", fix="Register it.")
    assert error.__notes__ == [explained_by("F02")]
    assert str(error) == "self.losses[0]\nRegister it."
    assert pickle.loads(pickle.dumps(error)).__notes__ == error.__notes__
    assert not hasattr(DDPLossError("text"), "__notes__")


def addressed(monkeypatch: pytest.MonkeyPatch, *urls: str) -> str:
    metadata = email.message.Message()
    for url in urls:
        metadata["Project-URL"] = url
    monkeypatch.setattr("importlib.metadata.metadata", lambda name: metadata)
    manual_address.cache_clear()
    try:
        return explained_by("F02")
    finally:
        monkeypatch.undo()
        manual_address.cache_clear()


def test_an_error_of_a_release_names_the_address_of_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = "Documentation, https://owner.github.io/name/manual.html"
    text = addressed(monkeypatch, "Source, https://github.com/owner/name", pages)
    assert text == "More: ddp-losses explain F02, or https://owner.github.io/name/explain/F02.html"
    assert addressed(monkeypatch, "Source, https://github.com/owner/name") == "More: ddp-losses explain F02"


def test_ranks_that_differ_are_sent_to_the_page_of_what_differs() -> None:
    lines = {name: [["loss", f"{name}={rank}"] for rank in "ab"] for name in ("weights", "width")}
    assert {name: messages._different_calls(texts).page for name, texts in lines.items()} == {
        "weights": "F02",
        "width": "F47",
    }
    with pytest.raises(errors.RankMismatchError) as caught:
        refuse_other_upstream_grads(["1", "2"])
    assert pickle.loads(pickle.dumps(caught.value)).page == "GlobalBatchLoss"
    with pytest.raises(errors.RankMismatchError) as caught:
        _refuse_other_items("state", [["a"], ["b"]], [True, False])  # type: ignore[list-item]
    assert caught.value.__notes__ == [explained_by("F52")]
