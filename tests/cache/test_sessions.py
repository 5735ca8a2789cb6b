"""A closed loop of sessions in one compiled loop."""

import numpy as np

from hybrid_kv.cache.check import check
from hybrid_kv.cache.config import CacheConfig
from hybrid_kv.cache.state import initial_state
from hybrid_kv.cache.statistics import statistics
from hybrid_kv.geometry import GroupSpec, resolve
from hybrid_kv.simulate import sessions
from hybrid_kv.simulate.workloads import Arrival


def test_sessions_go_on_from_their_own_answers_and_never_overlap():
    groups = [GroupSpec("mla", "mla", 8), GroupSpec("kda", "recurrent", 8)]
    sizes = {"max_requests": 3, "max_context": 64, "token_budget": 24, "max_drafts": 3}
    config = CacheConfig(resolve(groups, hash_unit=4), (128,), (0, 0), **sizes)
    rng, arrivals, said = np.random.default_rng(0), [], {}
    for _ in range(4):
        for session in range(4):
            prompt = np.concatenate([said.get(session, np.zeros(0, int)), rng.integers(0, 1 << 16, 5 + session)])
            answer = rng.integers(0, 1 << 16, 6)
            said[session] = np.concatenate([prompt, answer])
            arrivals.append(Arrival(session, prompt.astype(np.int32), answer.astype(np.int32)))
    # Every turn but the first resumes at the last multiple of 4 of what was computed of the one before.
    before = [len(one.prompt) - 5 - one.session - 1 for one in arrivals[4:]]
    served = {}
    for live, blocks in ((3, 128), (1, 128), (3, 22)):
        requests = sessions.traffic(config, arrivals, live)
        loop, through = sessions.begin(config, initial_state(config, (blocks,)), requests), False
        while not through:
            loop, through = sessions.serve(config, loop, requests, 7)
        assert loop.sent.all() and int(loop.idle) == 0
        assert blocks < 128 or check(config, loop.state) == []
        seen = served[live, blocks] = statistics(config, loop.state)
        assert seen.admissions == len(arrivals) and seen.queries == sum(len(one.prompt) for one in arrivals)
        assert int(loop.prefilled) == seen.queries - seen.hits or seen.preemptions
    assert served[3, 128].hits == served[1, 128].hits == sum(length // 4 * 4 for length in before)
    assert served[3, 22].evictions and served[3, 22].hits < served[3, 128].hits
