"""What to set where the nodes of a run do not find each other."""

from collections.abc import Iterator

from mp_agent.node.push.root import RootAddress
from mp_agent.ring.root_note import RootNote

_REMEDY = "set MP_AGENT_TOKEN to the same secret on all nodes"


def advice(
    note: RootNote | None, root: RootAddress | None, *, is_root: bool, has_token: bool
) -> Iterator[str]:
    """Yield what keeps a node apart from the others of its run.

    note: of the present attempt. has_token: whether this node can tell who belongs to the run.
    """
    if note is not None and note.problem:
        yield f"the job's store did not tell where the root agent is: {note.problem}"
    if is_root and not has_token:
        yield f"the rows of other nodes are refused, for want of a token: {_REMEDY}"
    elif not is_root and root is None:
        yield "the root agent is not known: set MP_AGENT_ROOT to its host:port"
    elif not is_root and root is not None and not root.token:
        yield f"no rows are pushed to the root agent, for want of a token: {_REMEDY}"
