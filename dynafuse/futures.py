"""Futures of kernels: finished ones, and ones that follow others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")


def finished(make: Callable[[], T]) -> Future[T]:
    """Return a future that is over: of what ``make`` returns, or of its failure."""
    future: Future[T] = Future()
    try:
        future.set_result(make())
    except Exception as error:  # not what ends the process: that is for whoever called
        future.set_exception(error)
    return future


def settle(future: Future[T], make: Callable[[], T]) -> None:
    """Give a future what ``make`` returns, or its failure: an error raised here would be logged, and waited for forever.

    Args:
        future: A future that is pending.
        make: Makes its result; whatever it raises, an interruption too, becomes the future's.
    """
    try:
        result = make()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def then(future: Future[T], function: Callable[[T], U]) -> Future[U]:
    """Return a future of ``function`` applied to a future's result.

    Args:
        future: The future; its failure is that of the result.
        function: Is called by whoever completes the future, at once if it is done.
    """
    following: Future[U] = Future()
    future.add_done_callback(lambda done: settle(following, lambda: function(done.result())))
    return following


def together(futures: Sequence[Future[T]]) -> Future[tuple[T, ...]]:
    """Return a future of the results of all futures, in order; once all are done it fails if one of them has failed."""
    whole: Future[tuple[T, ...]] = Future()
    but_last = iter(range(len(futures) - 1))  # whoever completes a future takes one; that takes no lock

    def count(done: Future[T]) -> None:
        if next(but_last, None) is None:
            settle(whole, lambda: tuple(future.result() for future in futures))

    for future in futures:
        future.add_done_callback(count)
    if not futures:
        whole.set_result(())
    return whole


def follow(source: Future[T], target: Future[T]) -> None:
    """Give ``target`` what ``source`` gets."""
    source.add_done_callback(lambda done: settle(target, done.result))


def has_failed(future: Future[T]) -> bool:
    """Return whether a future is known to hold an error by now."""
    return future.done() and future.exception() is not None


def outcome(futures: Mapping[str, Future[T]]) -> tuple[dict[str, T], dict[str, BaseException]]:
    """Wait for all; return what succeeded and what failed, by name."""
    errors = {name: error for name, future in futures.items() if (error := future.exception()) is not None}
    return {name: future.result() for name, future in futures.items() if name not in errors}, errors
