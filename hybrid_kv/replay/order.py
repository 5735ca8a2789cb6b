"""The closed loop's order: which request of a trace may be sent next."""

from collections.abc import Sequence, Set

from hybrid_kv.simulate.traces import TraceRequest, needs_answer


def next_request(requests: Sequence[TraceRequest], sent: Set[int], live: Set[int], overlap: bool = False) -> int | None:
    """Index of the first request, in trace order, that can start now; None if all that remain must wait.

    A session has one request live at most and its requests keep their order. A request whose prompt holds
    tokens of another request's answer waits for that answer. overlap: only the latter rule holds, which
    loads the engine more than the trace's agents would.
    """
    blocked = set() if overlap else {requests[index].session for index in live}
    for request in requests:
        if request.index in sent or request.session in blocked:
            continue
        if _can_build(request, requests, sent, live):
            return request.index
        if not overlap:
            blocked.add(request.session)  # the later turns of this session wait with it
    return None


def _can_build(request: TraceRequest, requests: Sequence[TraceRequest], sent: Set[int], live: Set[int]) -> bool:
    if not request.keep:
        return True
    if request.base not in sent:
        return False
    return request.base not in live or not needs_answer(request, requests)
