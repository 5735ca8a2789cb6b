"""Planning a step: rows of running requests, who gives way, who is admitted, what is fetched."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_kv.cache.reasons import Reason
from hybrid_kv.cache.reference import admission, external, publishing, room, states
from hybrid_kv.cache.reference.lookup import Hit
from hybrid_kv.cache.reference.plan import Row, Step
from hybrid_kv.cache.reference.pool import Block
from hybrid_kv.cache.reference.request import Request
from hybrid_kv.cache.reference.rules import Rules
from hybrid_kv.cache.reference.settling import Settling
from hybrid_kv.errors import UserError


class Scheduling(Settling):
    """The half of the scheduler that looks ahead. external: a store that may hold more than the pools."""

    def __init__(self, rules: Rules, store: external.External | None = None) -> None:
        super().__init__(rules)
        self.external = store
        self._steps = self._last_prefill = 0
        self._deferring = False

    def _plan(self, step: Step) -> None:
        self.flying.append(step)
        self._steps += 1
        self._deferring = self._prefills_wait()
        for name in list(self.running):
            if name in self.running and self._budget(step):
                self._continue(step, self.requests[name])
        self.short = bool(step.preempted)
        for name in self._queue():
            full = len(self.running) >= self.rules.most_running
            if step.preempted or self._deferring or full or not self._budget(step):
                break
            if not self._admit(step, self.requests[name]):
                self.short = True
                break
        if not step.rows:
            self.flying.remove(step)
        elif any(row.length - row.drafts > 1 for row in step.rows):
            self._last_prefill = self._steps

    def _budget(self, step: Step) -> int:
        return self.rules.token_budget - step.tokens

    def _prefills_wait(self) -> bool:
        """Whether this step is left to those that decode."""
        if self._steps - self._last_prefill >= self.rules.prefill_interval or not self._last_prefill:
            return False
        return any(not self.requests[name].prefilling for name in self.running)

    def _queue(self) -> list[str]:
        """Waiting requests in the order they are tried: those whose content was fetched, then by priority, else those
        that were preempted first."""

        def rank(name: str) -> tuple[int, int, int]:
            request = self.requests[name]
            urgent = request.priority if self.rules.priority else not request.epoch
            return request.pins is None, urgent, request.order

        return sorted(self.waiting, key=rank)

    def _continue(self, step: Step, request: Request) -> None:
        """A row for a running request; the newest give way if blocks lack."""
        sure = sum(row.samples for row in request.rows)
        if request.rows and len(request.tokens) + sure >= request.prompt + request.answer:
            return  # the rows in flight end it
        if self._deferring and request.prefilling:
            return
        known, most = request.known, self.rules.max_context
        drafts = request.drafts if request.planned == known - 1 else 0
        drafts = max(min(drafts, self._budget(step) - 1, most - known), 0)
        length = min(known - request.planned + drafts, self._budget(step), most - request.planned)
        if not drafts:
            length = min(length, self.rules.longest_chunk(len(self.requests)))
            length = states.cut(self, request, request.planned + length) - request.planned
        if length < 1:
            return
        while not self.fits(room.need(self, request, request.planned + length)):
            victim = self._newest()
            self._preempt(step, victim)
            if victim is request:
                return
        self._row(step, request, length, drafts)

    def _admit(self, step: Step, request: Request) -> bool:
        """A first chunk for a waiting request, if it can have one now; False if nobody after it may start either, since
        it does not fit."""
        if request.awaits_tokens or request.load:
            return True
        hit, find = admission.find_hit(self, request)
        if hit is None:
            return True
        if (fetched := self._fetch(step, request, hit)) is not None:
            return fetched
        adopted = admission.served(self, request, hit.tokens, find)
        if not self._fits_with(request, adopted, hit.tokens):
            if self.running:
                return False
            self._unpin_fetched()
        if not self._fits_with(request, adopted, hit.tokens):
            # Alone, and it still lacks blocks: those of the hit and of its copy. Without the hit it fits, see `arrive`.
            hit = hit._replace(tokens=0, reason=Reason.CAPPED if hit.tokens else hit.reason)
            adopted = [{} for _ in adopted]
            if not self._fits_with(request, adopted, 0):
                return False  # steps in flight hold the rest
        admission.adopt(self, request, hit, adopted)
        self._start(step, request, hit)
        return True

    def _fits_with(self, request: Request, adopted: Sequence[dict[int, Block]], hit: int) -> bool:
        """Whether a waiting request finds blocks, those that serve its hit included, and leaves what must stay free."""
        rules, known = self.rules, len(request.tokens)
        end = known if rules.admit_whole else min(known, hit + self._first_chunk(self.flying[-1]))
        spare = [int(rules.watermark * pool.size) if self.running else 0 for pool in self.pools]
        count = room.need(self, request, end, adopted, hit)
        return self.fits([blocks + free for blocks, free in zip(count, spare, strict=True)])

    def _first_chunk(self, step: Step) -> int:
        return min(self._budget(step), self.rules.longest_chunk(len(self.requests)))

    def _fetch(self, step: Step, request: Request, hit: Hit) -> bool | None:
        """Have content fetched that reaches beyond the local hit. None: there is none, go on with the hit; True: the
        request is served, or waits without holding up others; False: nobody after it may start either."""
        if self.external is None or request.asked or request.refused or not (self.rules.caching and request.read_cache):
            return None
        offer = self.external.ask(request.name, tuple(request.tokens), hit.tokens)
        if offer is None:
            return True
        if offer.tokens < 0 or min(offer.states, default=0) < 0:
            raise UserError("offer", offer, "use lengths of 0 tokens or more")
        tokens = external.usable(self, request, offer)
        if tokens <= hit.tokens:
            return None
        wanted = external.want(self, request, tokens)
        count = external.need(self, request, wanted, len(request.tokens))
        if offer.asynchronous:
            held = external.reserved(self, list(self.requests.values()))
            count = [blocks + others for blocks, others in zip(count, held, strict=True)]
        if not self.fits(count):
            return False if self.running or self.loads else None
        load = external.begin(self, request, wanted, offer.asynchronous, tokens - hit.tokens)
        step.loads.append(load)
        if offer.asynchronous:
            request.load = load
            self.loads.append(load)
        else:
            hit = Hit(tokens, max(tokens, hit.depth), Reason.NONE)
            admission.adopt_load(self, request, hit, load)
            self._start(step, request, hit)
        return True

    def _unpin_fetched(self) -> None:
        """When nothing runs and nothing fits, what was fetched for others is kept no longer than the cache can."""
        for name in self.waiting:
            self._unpin_load(self.requests[name])

    def _start(self, step: Step, request: Request, hit: Hit) -> None:
        """From the queue to those that run, with a first row."""
        self.waiting.remove(request.name)
        self.running.append(request.name)
        request.running = True
        step.admitted[request.name] = hit
        self.statistics.admitted(len(request.tokens), hit, resumed=request.epoch > 0)
        load = request.unproven or request.pins
        if load:
            self.statistics.external += max(min(hit.tokens, load.tokens) - (load.tokens - load.gained), 0)
        self._unpin_load(request)
        publishing.report_hit(self, request)
        end = hit.tokens + min(len(request.tokens) - hit.tokens, self._first_chunk(step))
        self._row(step, request, states.cut(self, request, end) - hit.tokens, 0)

    def _row(self, step: Step, request: Request, length: int, drafts: int) -> None:
        """Take the blocks of a row, plan the states it saves, and say what it will have written."""
        start, end = request.planned, request.planned + length
        row = Row(request, start, length, drafts, end - drafts >= request.known, epoch=request.epoch)
        row.slack = sum(other.drafts for other in request.rows)
        row.reads = [None] * len(request.tables)
        if request.name in step.admitted:
            row.reads = list(request.state_read)
            pairs = zip(request.copy, request.tables, strict=True)
            row.copies = [(pair[0], table[pair[1]]) for pair, table in pairs if pair]
        room.take(self, request, end)
        states.plan(self, row)
        request.planned, request.drafts = end, 0
        request.promised += row.promised
        request.rows.append(row)
        step.rows.append(row)
        publishing.announce(self, step, row)

    def _newest(self) -> Request:
        requests = [self.requests[name] for name in self.running]
        if self.rules.priority:
            return max(requests, key=lambda one: (one.priority, one.order))
        return requests[-1]

    def _preempt(self, step: Step, request: Request) -> None:
        """Back to the queue; what was computed stays to be found."""
        for row in [row for row in step.rows if row.request is request]:
            step.rows.remove(row)
            request.rows.remove(row)
            row.drop_emissions()
        self._put_back(request)
        step.preempted.append(request.name)

    def _put_back(self, request: Request) -> None:
        """From those that run to the queue, with nothing but its tokens."""
        self._release(request)
        self._clear(request)
        request.running = False
        request.epoch += 1
        self.running.remove(request.name)
        self.waiting.append(request.name)
        self.statistics.preemptions += 1
