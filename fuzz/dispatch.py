"""An operation as a call: the method of a target, or the arguments of the model's method of the same name."""

from collections.abc import Mapping
from typing import Any

from kvlockstep.fuzz.ops import (
    Abort,
    Alloc,
    Checkpoint,
    Commit,
    Evict,
    Match,
    Op,
    Peek,
    Release,
    Reset,
    Retract,
    Submit,
)
from kvlockstep.fuzz.targets.base import Target
from kvlockstep.reference.requests import Request


def call_target(target: Target, op: Op, requests: Mapping[str, Request]) -> object:
    """Call the method that an operation stands for; ``requests`` say what a match or peek is about.

    The tokens are a copy: a target that kept the model's own list would learn from it what was sampled.
    """
    match op:
        case Peek(name):
            request = requests[name]
            return target.peek(name, list(request.tokens), request.namespace, request.private)
        case Match(name):
            request = requests[name]
            return target.match(name, list(request.tokens), request.namespace, request.priority, request.private)
        case Alloc(batch):
            return target.alloc(batch)
        case Commit(name, kept, sampled):
            target.commit(name, kept, sampled)
        case Checkpoint(name):
            target.checkpoint(name)
        case Release(name):
            target.release(name)
        case Abort(name):
            target.abort(name)
        case Retract(name, publish):
            target.retract(name, publish)
        case Evict(n):
            return target.evict(n)
        case Reset():
            target.reset()
        case _:
            raise AssertionError(f"{op} never reaches a target")
    return None


def model_arguments(op: Op) -> tuple[Any, ...]:
    """Return the arguments of the model's method of that name."""
    match op:
        case Submit(request, tokens, namespace, priority, private):
            return (request, tokens, namespace, priority, private)
        case Alloc(batch):
            return ([(item.request, item.n, item.drafts) for item in batch],)
        case Commit(request, kept, sampled):
            return (request, kept, sampled)
        case Retract(request, publish):
            return (request, publish)
        case Evict(n):
            return (n,)
        case Reset():
            return ()
        case _:
            return (op.request,)
