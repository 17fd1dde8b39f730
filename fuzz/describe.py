"""Operations, configs and signatures as short text: the last lines of a message, and the name of a failure folder."""

from dataclasses import fields

from kvlockstep.fuzz.config import CacheConfig
from kvlockstep.fuzz.ops import Alloc, Commit, Evict, Op, Reset, Retract, Submit, kind_of
from kvlockstep.invariants import Violation


def describe_op(op: Op) -> str:
    """Say an operation as a reader would: ``alloc r0 n=3, r1 n=2 drafts=1``."""
    match op:
        case Alloc(batch):
            items = [
                f"{item.request} n={item.n}" + (f" drafts={len(item.drafts)}" if item.drafts else "") for item in batch
            ]
            return "alloc " + (", ".join(items) or "nothing")
        case Commit(request, kept, sampled):
            return f"commit {request} kept={kept}" + (f" sampled={len(sampled)}" if sampled else "")
        case Submit(request, tokens):
            return f"submit {request} with {len(tokens)} tokens"
        case Retract(request, publish):
            return f"retract {request}" + (" publish" if publish else "")
        case Evict(n):
            return f"evict {n}"
        case Reset():
            return "reset"
        case _:
            return f"{kind_of(op)} {op.request}"


def describe_config(config: CacheConfig) -> str:
    """Say the sizes, and of the switches only those that are not the plainest."""
    shown = ["page_size", "n_pages", "n_rows", "max_context_len"]
    plain = CacheConfig()
    shown += [
        f.name for f in fields(config) if f.name not in shown and getattr(config, f.name) != getattr(plain, f.name)
    ]
    values = {name: getattr(config, name) for name in shown}
    return " ".join(f"{name}={','.join(value) if name == 'options' else value}" for name, value in values.items())


def signature_of(violation: Violation, kind: str) -> str:
    """Return the cause signature: law, operation at which it was first seen, roles of the pages involved.

    It names the failure folder, merges duplicates, and keeps the minimizer from sliding to another bug.
    """
    parts = [type(violation).__name__, kind]
    if violation.roles:
        parts.append("+".join(violation.roles))
    signature = ".".join(parts).replace(" ", "-")
    # a role may be a name that a target gave, in any script
    return "".join(c if c.isascii() and c.isprintable() and c not in "/\\" else "_" for c in signature)[:200]


def as_sentence(text: str) -> str:
    """Cut a text to what the header of a trace may say in ``why``: one line, printable, not too long."""
    one_line = " ".join(text.split())
    return "".join(c if c.isprintable() else "?" for c in one_line)[:500]


def printable(text: str) -> str:
    r"""Write out all but printable characters and ends of lines.

    >>> printable("a\x1b[2J\u202eb\n")
    'a\\x1b[2J\\u202eb\n'
    """
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
