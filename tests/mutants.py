"""Break the caches, the scheduler and the GPU's kernels one line at a time: some test must notice each break.

    python tests/mutants.py               all of them, two at a time
    python tests/mutants.py -k lock       those whose name has this in it

A mutant is a copy of the package with one line changed. Its own chapter runs first, on the copy, then the chapters
above, then random lives of a server and of the tree, or the tests of kernels. Whoever survives is named, and the exit code is 1: write the test that
is missing. A line that is no longer there is an error too.
"""
import argparse, os, shutil, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from nbrun import chapter, notebooks, run

root = Path(__file__).resolve().parents[1]
chapters = {'process': 'process', 'core/kv_cache/table': 'core/10_kv_cache.table', 'core/kv_cache/eviction': 'core/11_kv_cache.eviction', 'core/kv_cache/radix': 'core/12_kv_cache.radix or core/13_kv_cache.namespaces', 'distributed/kv_events': 'distributed/kv_events',
            'distributed/page_file': 'distributed/page_file', 'distributed/tier': 'distributed/tier', 'distributed/handoff': 'distributed/handoff',
            'core/kv_cache/manager': 'core/14_kv_cache.manager or core/15_kv_cache.release', 'server/router': 'server/router', 'server/prefill_router': 'server/prefill_router',
            'rules/fairness': 'rules/fairness', 'core/scheduler/policy': 'core/16_scheduler.policy', 'core/scheduler/prefill': 'core/17_scheduler.prefill',
            'core/scheduler/decode': 'core/18_scheduler.decode', 'core/scheduler/batch': 'core/21_scheduler.batch',
            'core/scheduler/scheduler': 'core/19_scheduler.lifecycle or core/20_scheduler.results or core/22_scheduler.scheduler or core/23_scheduler.control',
            'kernels/fused_heads': 'kernels/fused_heads', 'kernels/sampling': 'kernels/sampling', 'kernels/grouped_matmul': 'kernels/grouped_matmul',
            'kernels/page_list': 'kernels/page_list', 'kernels/trials': 'kernels/trials', 'kernels/kernel_trials': 'kernels/kernel_trials', 'kernels/fp8': 'kernels/fp8', 'kernels/gpu_operations': 'kernels/gpu_operations', 'kernels/experts': 'kernels/experts',
            'kernels/attention_choice': 'kernels/attention_choice', 'core/attention/library': 'core/26_attention.library', 'formats/weight_control': 'formats/weight_control'}
gpu = 'kernels/'   # its other tests are those of kernels
KERNELS = ['tests/test_triton.py', 'tests/test_fp8.py', 'tests/test_flashinfer.py']
LIVES = ['tests/test_hostile_callers.py', 'tests/test_radix.py', 'tests/test_scheduler.py', 'tests/test_hostile_chunks.py']
ROUTED = ['tests/test_router.py', 'tests/test_prefill.py']   # of what stands before several engines

mutants = [   # what breaks, module, the line, what becomes of it
    ('a row is allocated twice', 'core/kv_cache/table', 'row = self._free.pop()', 'row = self._free[-1]'),
    ('a row freed twice is not noticed', 'core/kv_cache/table', 'if row not in self._allocated:', 'if False:'),
    ('the dummy row is allocated', 'core/kv_cache/table', 'reversed(range(max_running_req))', 'reversed(range(max_running_req + 1))'),
    ('a device never learns of new pages', 'core/kv_cache/table', 'self._changed.append((rows, cols))', 'pass'),
    ('slots forget the offset in the page', 'core/kv_cache/table', 'positions + (self.pages[rows, cols] - cols) * self.page_size', 'self.pages[rows, cols] * self.page_size'),
    ('tokens that differ count as common', 'core/kv_cache/radix', 'differ = a[:n] != b[:n]', 'differ = a[:n] > b[:n]'),
    ('common pages are rounded up', 'core/kv_cache/radix', 'return int(differ.argmax() if differ.any() else n) // page_size',
     'return -(-int(differ.argmax() if differ.any() else n) // page_size)'),
    ('a split forgets the locks', 'core/kv_cache/radix', 'children={}, entry_no=0)', 'children={}, entry_no=0, locks=0)'),
    ('a split leaves the old parent', 'core/kv_cache/radix', 'node.pages[n_pages:], head', 'node.pages[n_pages:], node.parent'),
    ('a locked leaf is offered for eviction', 'core/kv_cache/radix', 'if node.locks or node.children or node is self.root: return',
     'if node.children or node is self.root: return'),
    ('an inner node is offered for eviction', 'core/kv_cache/radix', 'if node.locks or node.children or node is self.root: return',
     'if node.locks or node is self.root: return'),
    ('a parent is not offered when its last child went', 'core/kv_cache/radix', 'self._offer(parent)', 'pass'),
    ('the tree shares the array of the caller', 'core/kv_cache/radix', 'np.array(ids, dtype=np.int32), np.array(pages, dtype=np.int32)', 'np.asarray(ids, dtype=np.int32), np.asarray(pages, dtype=np.int32)'),
    ('use does not count for the eviction order', 'core/kv_cache/radix', 'self._step += 1', 'pass'),
    ('a lock does not protect', 'core/kv_cache/radix', 'self._add_locks(handle.path, 1, handle.priority)', 'self._add_locks([], 1, handle.priority)'),
    ('an unlock is forgotten', 'core/kv_cache/radix', 'self._add_locks(handle.path, -1, handle.priority)', 'self._add_locks([], -1, handle.priority)'),
    ('what was found before it ran is not counted', 'core/kv_cache/radix', 'for node in handle.path + below if first else below: node.hits += 1', 'for node in below: node.hits += 1'),
    ('a user of importance makes no difference', 'core/kv_cache/radix', 'if priority > node.priority: node.priority = priority', 'pass'),
    ('the last user decides the importance', 'core/kv_cache/radix', 'if priority > node.priority: node.priority = priority', 'node.priority = priority'),
    ('a head keeps the tokens of its tail alive', 'core/kv_cache/radix', 'key=node.key[:n].copy()', 'key=node.key[:n]'),
    ('a head keeps the pages of its tail alive', 'core/kv_cache/radix', 'pages=node.pages[:n_pages].copy()', 'pages=node.pages[:n_pages]'),
    ('what was hidden waits for its old turn', 'core/kv_cache/radix', 'node.invalid = True\n            self._offer(node)', 'node.invalid = True'),
    ('nobody is told of a new leaf', 'core/kv_cache/radix', 'self.observer.stored(leaf)', 'pass'),
    ('nobody is told of evictions', 'core/kv_cache/radix', 'self.observer.removed(cut)', 'pass'),
    ('nobody is told of what was hidden', 'core/kv_cache/radix', 'self.observer.removed(node.pages)', 'pass'),
    ('what was taken back is told', 'distributed/kv_events', 'if self._changes.pop(block, stored) == stored: self._changes[block] = stored', 'self._changes[block] = stored'),
    ('a lost batch is not noticed', 'distributed/kv_events', 'self.complete &= events.number == self._number + 1', 'pass'),
    ('nothing waits for a launched batch', 'core/kv_cache/manager', 'ready = [items for step, items in self._waiting if step <= completed]',
     'ready = [items for step, items in self._waiting]'),
    ('what waits is lost', 'core/kv_cache/manager', 'self._waiting = [entry for entry in self._waiting if entry[0] > completed]', 'self._waiting = []'),
    ('all of the prompt is matched', 'core/kv_cache/manager', 'matchable_len = pending.matchable_len', 'matchable_len = pending.n_tokens'),
    ('pages are rounded down', 'core/kv_cache/manager', 'return -(-n_tokens // self.page_size)', 'return n_tokens // self.page_size'),
    ('a row goes on pointing at a freed duplicate', 'core/kv_cache/manager', 'self.table.write(np.full(len(duplicates), row), first + duplicates, cached[duplicates])', 'pass'),
    ('a duplicate is free at once', 'core/kv_cache/manager', 'self._release(own[duplicates], self._launched(req))', 'self._release(own[duplicates], 0)'),
    ('pages of the ended are free at once', 'core/kv_cache/manager', 'self._release(self._own_pages(req), launched)', 'self._release(self._own_pages(req), 0)'),
    ('locks of the ended are given up at once', 'core/kv_cache/manager', 'self._unlocking.put([handle], launched)',
     'self._unlocking.put([handle], 0)'),
    ('tokens that the host does not know are inserted', 'core/kv_cache/manager', 'n_tokens = min(self._cached_len(req), n_known)', 'n_tokens = self._cached_len(req)'),
    ('the last token is trusted', 'core/kv_cache/manager', 'pending.n_tokens - 1)', 'pending.n_tokens)'),
    ('tokens that are not computed are inserted', 'core/kv_cache/manager', 'n_tokens = min(self._cached_len(req), n_known)', 'n_tokens = n_known'),
    ('a retraction frees nothing', 'core/kv_cache/manager', 'return own + self.prefix.freed_by([_locked_prefix(o) for o in reqs])', 'return 0'),
    ('a retraction frees only its own pages', 'core/kv_cache/manager', 'return own + self.prefix.freed_by([_locked_prefix(o) for o in reqs])', 'return own'),
    ('the tree is not checked', 'core/kv_cache/manager', '    self.prefix.check_integrity()\n', '    pass\n'),
    ('what failed is cached', 'core/kv_cache/manager', 'if keep: self._insert_prefix', 'if True: self._insert_prefix'),
    ('invalid pages are matched by others', 'core/kv_cache/manager', 'self.prefix.invalidate(_locked_prefix(req))', 'pass'),
    ('prefixes of other namespaces are matched', 'core/kv_cache/manager', 'params.extra_key, params.priority)', 'None, params.priority)'),
    ('evicted pages are forgotten', 'core/kv_cache/manager', 'self._push(evicted)', 'pass'),
    ('waiting pages do not count as available', 'core/kv_cache/manager', 'return self.ready_size + self.releasing.size', 'return self.ready_size'),
    ('room is compared before the lock', 'core/scheduler/prefill', 'self.cache.lock(handle)\n        needed', 'needed'),
    ('a refused request keeps its lock', 'core/scheduler/prefill', 'self.cache.unlock(handle)\n            self.closed', 'self.closed'),
    ('pages are not reserved', 'core/scheduler/prefill', 'self.reserved_pages += self._pages_left(pending, start)', 'pass'),
    ('running requests have no reservation', 'core/scheduler/scheduler', 'self.prefill.schedule(self.decode.inflight_pages, mixed_decode_tokens)\n        if', 'self.prefill.schedule(0, mixed_decode_tokens)\n        if'),
    ('tokens are reserved, not pages', 'core/scheduler/decode', '-(-ends // self.page_size) - -(-lens // self.page_size)',
     '(ends - lens) // self.page_size'),
    ('the chunked request waits its turn', 'core/scheduler/prefill', 'self._start(adder, self.chunked) if self.chunked else []', 'self._start(adder, self.chunked) if self.chunked and not self.waiting else []'),
    ('two requests are in chunks at once', 'core/scheduler/prefill', 'self.may_cut, self.closed = self.may_cut and prompt_ends,', 'self.may_cut, self.closed = True,'),
    ('a batch ends with its chunk', 'core/scheduler/prefill', 'if adder.closed: break', 'if adder.closed or self.chunked: break'),
    ('a step may compute any number of tokens', 'core/scheduler/prefill', 'self.may_cut and prompt_ends, self.token_budget <= 0', 'self.may_cut and prompt_ends, False'),
    ('requests that lack pages are passed over', 'core/scheduler/prefill', 'self.cache.unlock(handle)\n            self.closed = True', 'self.cache.unlock(handle)'),
    ('a prompt that must wait ends the batch', 'core/scheduler/prefill', 'self.closed = not self._pass_over(pending, handle)', 'self.closed = True'),
    ('what is cached makes no prompt shorter', 'core/scheduler/prefill', 'pending.n_tokens - handle.cached_len > limit', 'pending.n_tokens > limit'),
    ('a prompt passed over keeps no pages', 'core/scheduler/prefill', 'self.reserved_rows = self.reserved_pages + available - left, 1', 'self.reserved_rows = self.reserved_pages, 1'),
    ('a prompt passed over keeps no row', 'core/scheduler/prefill', 'self.reserved_rows = self.reserved_pages + available - left, 1', 'self.reserved_rows = self.reserved_pages + available - left, 0'),
    ('the row that is kept is given away', 'core/scheduler/prefill', 'if self.table.available_size <= self.reserved_rows:', 'if not self.table.available_size:'),
    ('all that are passed over keep pages', 'core/scheduler/prefill', 'if not self.passed_over:', 'if True:'),
    ('a prompt passed over keeps its pages, and not its match', 'core/scheduler/prefill', 'available = self.cache.available_size\n            self.cache.lock(handle)', 'self.cache.lock(handle)\n            available = self.cache.available_size'),
    ('a prompt passed over keeps its lock', 'core/scheduler/prefill', 'self.cache.unlock(handle)\n            if left', 'if left'),
    ('a prompt without room is passed over', 'core/scheduler/prefill', 'if left < self.reserved_pages: return False', 'pass'),
    ('any number of prompts is passed over', 'core/scheduler/prefill', 'if self.passed_over == self.max_passed_over: return False', 'pass'),
    ('the queue is tried at every chunk', 'core/scheduler/prefill', 'if adder.closed or self.blocked and not any(map(gt, room, self._blocked_at)): return reqs', 'if adder.closed: return reqs'),
    ('the policy is asked for nothing', 'core/scheduler/prefill', 'if adder.closed or self.blocked and', 'if self.blocked and'),
    ('the queue stays blocked when a prompt may be cut', 'core/scheduler/prefill', 'self.cache.table.available_size, pages, adder.may_cut', 'self.cache.table.available_size, pages'),
    ('the queue stays blocked by one that left', 'core/scheduler/prefill', 'if any(queue.pop(pending.rid, None) for queue in queues): self.blocked = None', 'any(queue.pop(pending.rid, None) for queue in queues)'),
    ('a chunk is sampled', 'core/scheduler/prefill', 'prompt_ends = end == pending.n_tokens', 'prompt_ends = True'),
    ('the row keeps the cached length of its last owner', 'core/scheduler/prefill', 'self.lengths.cached_len[row] = handle.cached_len', 'pass'),
    ('stop tokens are not watched', 'core/scheduler/prefill', 'ends = pending.params.stop_token_ids, pending.stop_check, pending.grammar', 'ends = pending.grammar,'),
    ('grammars are not watched', 'core/scheduler/prefill', 'ends = pending.params.stop_token_ids, pending.stop_check, pending.grammar', 'ends = pending.params.stop_token_ids, pending.stop_check'),
    ('grammars do not accept tokens', 'core/scheduler/scheduler', 'complete = pending.grammar.accept(token) if pending.grammar else False', 'complete = False'),
    ('a mask comes a token late', 'core/scheduler/scheduler', '        forwarded = self._launch(batch) if batch else None\n        self._drain()\n', '        forwarded = self._launch(batch) if batch else None\n        mask = self._grammar_mask(batch) if batch else None\n        self._grammar_mask = lambda batch: mask\n        self._drain()\n'),
    ('decode runs past the end', 'core/scheduler/decode', 'if stays.all(): return', 'return'),
    ('the rows are not made anew when one leaves', 'core/scheduler/decode', 'if self.running.pop(rid, None): self._rows = None', 'self.running.pop(rid, None)'),
    ('only one end-of-sequence token counts', 'core/scheduler/scheduler', 'token in eos_token_ids and', 'token == min(eos_token_ids, default=None) and'),
    ('length is checked one token late', 'core/scheduler/scheduler', 'if pending.n_tokens == pending.max_len', 'if pending.n_tokens == pending.max_len + 1'),
    ('no row is watched', 'core/scheduler/scheduler', 'is_eos[tokens] | lengths.watched[rows] |', 'is_eos[tokens] |'),
    ('a page is allocated that is there already', 'core/scheduler/batch', 'self.first_pages = -(-self.cached_lens // page_size)',
     'self.first_pages = self.cached_lens // page_size'),
    ('a batch shows the lengths of later steps', 'core/scheduler/batch', 'self.cached_lens, self.device_lens = lengths.cached_len[rows], lengths.device_len[rows]',
     'self.cached_lens, self.device_lens = lengths.cached_len[rows], lengths.device_len[:len(reqs)]'),
    ('pages that are only being released are allocated', 'core/scheduler/scheduler', 'if plan.new_pages > self.cache.ready_size:', 'if False:'),
    ('a token after the end is output', 'core/scheduler/scheduler', 'if pending.ended: return\n        if not finite', 'if not finite'),
    ('an abort in flight is forgotten', 'core/scheduler/scheduler', 'if pending.to_finish: return self.finish(pending, *pending.to_finish)', 'pass'),
    ('rows are free at once', 'core/scheduler/scheduler', 'self._deferred.rows.put([row], int(self.table.lengths.launched[row]))', 'self._deferred.rows.put([row], 0)'),
    ('rows are never free', 'core/scheduler/scheduler', 'self.table.free(row)', 'pass'),
    ('a prompt is inserted into the tree twice', 'core/scheduler/scheduler', 'self._deferred.to_cache, self._deferred.to_release = [], []', 'self._deferred.to_release = []'),
    ('nothing is inserted into the tree before the end', 'core/scheduler/scheduler', 'self._deferred.to_cache = [o for o in batch.reqs if o.rid not in running]', 'pass'),
    ('what failed stays in the tree', 'core/scheduler/scheduler', 'self.cache.flush()\n            self._deferred', 'self._deferred'),
    ('after a failure batches are still in flight', 'core/scheduler/scheduler', 'self.completed = self._deferred.flush_after = self.launched ', 'self._deferred.flush_after = self.launched '),
    ('the batch after a failed one is awaited', 'core/scheduler/scheduler', 'if batch and batch.step > self.completed:', 'if batch:'),
    ('a rid is used twice', 'core/scheduler/scheduler', 'if rid in self.alive:', 'if False:'),
    ('a request that can never fit is accepted', 'core/scheduler/prefill', 'longest = min(self.max_seq_len, self.slots + 1)', 'longest = min(self.max_seq_len, self.slots + 99)'),
    ('a request to recompute outputs its tokens', 'core/scheduler/scheduler', 'if pending.req in self._deferred.to_recompute: return\n        if not finite:', 'if not finite:'),
    ('a request is recomputed while in flight', 'core/scheduler/scheduler', 'landed = [o for o in alive if lengths.launched[o.table_idx] <= self.completed]', 'landed = alive'),
    ('a request that fails by its cached prefix ends', 'core/scheduler/scheduler', '        self._mark_to_recompute(req)\n        pending.shares_cache = False', '        pending.shares_cache = False'),
    ('a stale entry is evicted', 'core/kv_cache/eviction', 'if entry_no != item.entry_no: continue', 'pass'),
    ('a rank that rose by itself is not noticed', 'core/kv_cache/eviction', 'if (*rank,) == self.rank(item): return item', 'return item'),
    ('what is invalid waits for its turn', 'core/kv_cache/eviction', 'return (-math.inf,) if item.invalid else self._policy(item)', 'return self._policy(item)'),
    ('stale entries are never swept out', 'core/kv_cache/eviction', 'if len(self.entries) > self.sweep_at: self._sweep()', 'pass'),
    ('what is exchanged for another\'s does not count as borrowed', 'core/kv_cache/radix', 'if n: handle.borrowed = True', 'pass'),
    ('what is found does not count as borrowed', 'core/kv_cache/radix', 'priority, borrowed=n > 0)', 'priority)'),
    ('who begins anew by itself finds the same', 'core/kv_cache/manager', 'if pending.shares_cache:', 'if True:'),
    ('a request recomputed without the cache shares', 'core/scheduler/scheduler', 'keep=pending.shares_cache and not pending.kv_invalid', 'keep=not pending.kv_invalid'),
    ('a retracted request goes to the end of the queue', 'core/scheduler/scheduler', 'self.prefill.requeue(pending, at_head)', 'self.prefill.requeue(pending, False)'),
    ('a retracted request keeps its row', 'core/scheduler/scheduler', 'self._release_request(pending.req)\n        self._collect()\n        self.prefill', 'self.prefill'),
    ('a preempted request is in the batch all the same', 'core/scheduler/scheduler', 'reqs = [] if waits else self._select_prefill(mixed_decode_tokens)\n        running = self.decode.schedule() ', 'running = self.decode.schedule()\n        reqs = [] if waits else self._select_prefill(mixed_decode_tokens) '),
    ('no request is retracted', 'core/scheduler/scheduler', 'if plan.new_pages <= self.cache.ready_size: return plan', 'return plan'),
    ('the last one is retracted too', 'core/scheduler/scheduler', 'if len(victims) > 1 or mode is not ForwardMode.DECODE: self.retract(victims[0])', 'if True: self.retract(victims[0])'),
    ('the new token ratio never adapts', 'core/scheduler/decode', 'seen = expected / (max_new_tokens.sum() + 1)', 'seen = 0'),
    ('the clip is forgotten', 'core/scheduler/decode', 'np.ceil(clipped * self.ratio)', 'np.ceil(left * self.ratio)'),
    ('most tokens made are retracted first', 'core/scheduler/decode', 'return sorted(order, key=lambda req: len(req.output_ids))', 'return sorted(order, key=lambda req: -len(req.output_ids))'),
    ('a pause does not hold', 'core/scheduler/scheduler', 'if self.paused: return None', 'pass'),
    ('the prefill streak is not bounded', 'core/scheduler/scheduler', 'waits = too_long or ', 'waits = '),
    ('every request is preempted', 'core/scheduler/scheduler', 'if o.params.priority < limit', 'if True'),
    ('timeouts never expire', 'core/scheduler/scheduler', 'while self._queue and self._queue[0][0] <= now:', 'while False:'),
    ('an abort ends at once', 'core/scheduler/scheduler', 'if req and lengths.launched[req.table_idx] > self.completed:', 'if False:'),
    ('an aborted request is launched again', 'core/scheduler/scheduler', 'pending.to_finish = pending.to_finish or (reason, error)\n        self.prefill.remove(pending)\n        self.decode.remove_req(pending.rid)', 'pending.to_finish = pending.to_finish or (reason, error)\n        self.prefill.remove(pending)'),
    ('an aborted prompt goes on', 'core/scheduler/scheduler', 'pending.to_finish = pending.to_finish or (reason, error)\n        self.prefill.remove(pending)', 'pending.to_finish = pending.to_finish or (reason, error)'),
    ('callers get answers for nothing', 'rules/fairness', 'self.output_cost * (pending.n_tokens - pending.input_len)', '0'),
    ('callers pay for what is cached', 'rules/fairness', 'self.prompt_cost * (pending.input_len - pending.cached_tokens)', 'self.prompt_cost * pending.input_len'),
    ('callers have no weight', 'rules/fairness', '(cost - before) / weight', 'cost - before'),
    ('callers pay once more in each pass', 'rules/fairness', 'self._charged[pending] = cost', 'pass'),
    ('callers are charged a pass late', 'rules/fairness', '            yield pending\n            self._charge(pending)', '            yield pending'),
    ('callers save up while they are idle', 'rules/fairness', 'max(self.served.get(member, 0.), self._floor)', 'self.served.get(member, 0.)'),
    ('callers are forgiven when they come again', 'rules/fairness', 'max(self.served.get(member, 0.), self._floor)', 'self._floor'),
    ('callers are remembered for ever', 'rules/fairness', 'self._forget(members.keys())', 'pass'),
    ('callers hold what has ended', 'rules/fairness', 'if pending.finish_reason or not cost:', 'if not cost:'),
    ('callers share nothing among their users', 'rules/fairness', 'self.users[name].add(user, cost - before)', 'pass'),
    ('callers preempt each other', 'rules/fairness', 'return head.caller[:2] == running.caller[:2]', 'return True'),
    ('callers may fill the queue', 'rules/fairness', 'return least_important(queues[most])', 'return None'),
    ('callers are displaced by wrong requests', 'core/scheduler/scheduler', '        self._make_room(pending)\n', ''),
    ('below: a damaged page is believed', 'distributed/page_file', 'found == key and n == out.nbytes and digest(key, out) == right', 'found == key and n == out.nbytes'),
    ('below: half a page is believed', 'distributed/page_file', 'return blake2b(data.data, key=key, digest_size=KEY_BYTES).digest()', 'return blake2b(data[:1], key=key, digest_size=KEY_BYTES).digest()'),
    ('below: two engines write one file', 'distributed/page_file', 'flock(fd, LOCK_EX | LOCK_NB)', 'pass'),
    ('below: a link is followed', 'distributed/page_file', ' | os.O_NOFOLLOW', ''),
    ('below: anything is opened for a file', 'distributed/page_file', 'if about.st_uid != os.geteuid() or not S_ISREG(about.st_mode):', 'if False:'),
    ('below: others may read', 'distributed/page_file', 'with suppress(OSError): os.fchmod(fd, 0o600)', 'pass'),
    ('below: any number of a write is believed', 'distributed/page_file', 'if 0 < number < _MOST_WRITES:', 'if number:'),
    ('below: pages of another size are read', 'distributed/page_file', 'os.ftruncate(self._fd, 0)', 'pass'),
    ('below: the newest slot is given away', 'distributed/page_file', 'self._slot_of.popitem(last=False)', 'self._slot_of.popitem()'),
    ('below: a forgotten slot is lost', 'distributed/page_file', 'if slot is not None: self._free.append(slot)', 'pass'),
    ('below: a write counts as an old one after a restart', 'distributed/page_file', 'by_age[-1][0] if by_age else 0', '0'),
    ('below: tenants share keys', 'distributed/kv_events', 'blake2b(fingerprint + repr(extra_key).encode(),', 'blake2b(fingerprint,'),
    ('below: what comes before does not matter', 'distributed/kv_events', 'blake2b(before + data[i - size:i],', 'blake2b(data[i - size:i],'),
    ('below: weights do not matter', 'distributed/kv_events', 'blake2b(fingerprint + repr(extra_key).encode(),', 'blake2b(repr(extra_key).encode(),'),
    ('below: a split leaves the keys', 'core/kv_cache/radix', 'if node.keys: node.keys = node.keys[n_pages:]', 'pass'),
    ('below: what is invalid is kept', 'distributed/tier', '        if node.invalid: return\n', ''),
    ('below: the first pages are dropped, not the last', 'distributed/tier', 'if new := new[:n]:', 'if new := new[max(len(new) - n, 0):]:'),
    ('below: pages of the wrong end are kept', 'distributed/tier', 'node.pages[keep:][new]', 'node.pages[new]'),
    ('below: any number of pages moves', 'distributed/tier', 'n = max(self.room, 0)', 'n = len(new)'),
    ('below: a lock does not keep an entry', 'distributed/tier', 'if entry.locks or self._host.get(entry.key) is not entry: return', 'if self._host.get(entry.key) is not entry: return'),
    ('below: what rests is never dropped', 'distributed/tier', 'while len(self._rest) > self.host_pages:', 'while False:'),
    ('below: a page is used before it has arrived', 'distributed/tier', 'return not all(entry.lost or entry.arrival.query() for entry in lease.entries)', 'return False'),
    ('below: what is lost is waited for', 'distributed/tier', 'entry.lost or entry.arrival.query()', 'entry.arrival.query()'),
    ('below: a disk that hangs is waited for', 'distributed/tier', 'if self.disk_hangs and not self._rising[-1][0].lost: self._give_up()', 'pass'),
    ('below: a disk that hangs is asked for more', 'distributed/tier', 'lost = entry.lost if entry else self.disk_hangs', 'lost = entry and entry.lost'),
    ('below: a file is closed under a write', 'distributed/tier', 'self._stream.submit(self._file.close)', 'self._file.close()'),
    ('below: an end waits for the disk', 'distributed/tier', 'self._stream.close(max(end - self._clock(), 0.))', 'self._stream.close()'),
    ('below: an end leaves the tree', 'core/kv_cache/manager', 'for source in self.sources.values(): source.close(evict)', 'for source in self.sources.values(): source.close(lambda n: 0)'),
    ('below: an end is in a hurry', 'distributed/tier', '(evict(self.room) or self._leaving or self._writing) and', 'evict(self.room) and'),
    ('below: a read that failed is believed', 'distributed/tier', 'if not file.read(slot, key, data): entry.lost = True', 'file.read(slot, key, data)'),
    ('below: a copy that failed is believed', 'distributed/tier', 'except BaseException: self.lost = True ', 'except BaseException: pass '),
    ('below: a gap is filled with what follows', 'distributed/tier', 'if lease is None or start < lease.first:\n            self', 'if lease is None:\n            self'),
    ('below: a longer match shifts the pages', 'distributed/tier', 'lease.entries[start - lease.first:]', 'lease.entries'),
    ('below: a lease is never dropped', 'core/kv_cache/manager', 'if source := self._source(pending): source.drop(pending)', 'pass'),
    ('below: nothing is dropped by whoever leaves the queue', 'core/scheduler/prefill', '        self.cache.drop(pending)\n', ''),
    ('below: emptied pages are still taken', 'distributed/tier', 'for entry in self._host.values(): entry.lost = True', 'pass'),
    ('below: an emptied file keeps its pages', 'distributed/tier', 'if self._file: self._stream.submit(self._file.erase)', 'pass'),
    ('below: new weights read pages of old ones', 'core/scheduler/scheduler', 'self.cache.renew()', 'pass'),
    ('below: who waits keeps pages of old weights', 'distributed/tier', 'for pending in [*self._leases]: self.drop(pending)', 'pass'),
    ('below: NaN stays on the disk', 'core/kv_cache/manager', 'for source in self.sources.values(): source.clear()', 'pass'),
    ('below: what came up does not count as borrowed', 'core/kv_cache/manager', 'handle.borrowed, self.table.lengths.cached_len[row] = True, end * self.page_size', 'self.table.lengths.cached_len[row] = end * self.page_size'),
    ('below: what comes up is not in the row', 'core/kv_cache/manager', 'self.table.write(np.full(len(pages), row), np.arange(first, end), pages)', 'pass'),
    ('below: what comes up is not copied', 'core/kv_cache/manager', 'source.write_pages(pages, data)', 'pass'),
    ('below: who shares nothing finds pages', 'core/kv_cache/manager', 'if not source or not pending.shares_cache: return False', 'if not source: return False'),
    ('below: the last token comes up, too', 'core/kv_cache/manager', 'handle.cached_len, pending.matchable_len)', 'handle.cached_len, pending.n_tokens)'),
    ('below: who waits for pages starts at once', 'core/scheduler/prefill', 'if self.cache.arriving(pending, handle):', 'if self.cache.arriving(pending, handle) and False:'),
    ('below: who waits for pages blocks the queue', 'core/scheduler/prefill', 'blocked = len(reqs) == n_chunked and not self.travelling', 'blocked = len(reqs) == n_chunked'),
    ('below: that all wait for pages looks like a deadlock', 'core/scheduler/scheduler', 'elif stood_still and self.prefill.travelling: self.cache.idle()', 'elif False: pass'),
    ('below: nothing that has arrived is noticed', 'core/kv_cache/manager', 'for source in self.sources.values(): source.collect()', 'pass'),
    ('handed over: all of the prompt', 'distributed/handoff', 'return (pending.input_len - 1) // self.page_size', 'return pending.input_len // self.page_size'),
    ('handed over: pages of another tenant', 'distributed/handoff', 'root_hash(pending.params.extra_key,', 'root_hash(None,'),
    ('handed over: pages of other weights', 'distributed/handoff', 'self._fingerprint = self._make_fingerprint()', 'pass'),
    ('handed over: who waits keeps pages of old weights', 'distributed/handoff', '        self.clear()\n', ''),
    ('handed over: any number of pages is copied', 'distributed/handoff', '[:self.n_pages(pending)][:self.room]', '[:self.n_pages(pending)]'),
    ('handed over: any number of pages is written', 'distributed/handoff', 'data = data[:self.most_pages - sum(n for _, n in self._files)]', 'pass'),
    ('handed over: removed files take room', 'distributed/handoff', 'self._files = [o for o in self._files if os.path.exists(o[0])]', 'pass'),
    ('handed over: a copy is not waited for', 'distributed/handoff', 'try: arrival.synchronize()', 'try: pass'),
    ('handed over: a copy that failed is believed', 'distributed/handoff', 'except BaseException: data = []', 'except BaseException: pass'),
    ('handed over: a file appears that nobody wants', 'distributed/handoff', 'if late(): return file.remove()', 'pass'),
    ('handed over: half a file is seen', 'distributed/handoff', "f'{name}.part')", "f'{name}.kv')"),
    ('handed over: who removes a file causes a warning', 'distributed/handoff', 'except FileNotFoundError: pass', 'except ZeroDivisionError: pass'),
    ('handed over: an error of the folder ends all', 'distributed/handoff', 'except (OSError, ValueError) as e:', 'except ZeroDivisionError as e:'),
    ('handed over: a gap is filled with what follows', 'distributed/handoff', 'if coming is None or start < coming.first:', 'if coming is None:'),
    ('handed over: pages are used before they have come', 'distributed/handoff', 'return not (coming.arrival.query() or self.hangs)', 'return False'),
    ('handed over: a folder that hangs is waited for', 'distributed/handoff', 'return not (coming.arrival.query() or self.hangs)', 'return not coming.arrival.query()'),
    ('handed over: a folder that hangs is asked for more', 'distributed/handoff', 'n = 0 if self.hangs else min(', 'n = min('),
    ('handed over: any number of pages is read', 'distributed/handoff', 'min(min(end, self.n_pages(pending)) - start, self.room)', 'min(end, self.n_pages(pending)) - start'),
    ('handed over: to ask makes a file', 'distributed/handoff', 'if not os.path.exists(path): return ', 'if False: return '),
    ('handed over: a damaged page is believed', 'distributed/handoff', 'if not file.read(i, keys[i], out): break', 'file.read(i, keys[i], out)'),
    ('handed over: pages are taken that are being read', 'distributed/handoff', 'if coming and start >= coming.first and coming.arrival.query():', 'if coming and start >= coming.first:'),
    ('handed over: a longer match shifts the pages', 'distributed/handoff', 'coming.data[start - coming.first:coming.n_right]', 'coming.data[:coming.n_right]'),
    ('handed over: more is taken than there is room for', 'distributed/handoff', 'coming.n_right][:most]', 'coming.n_right]'),
    ('handed over: who waits no more holds pages', 'distributed/handoff', '        self._leases.pop(pending, None)\n\n', '        pass\n\n'),
    ('handed over: nothing that has come is noticed', 'distributed/handoff', 'while self._reading and self._reading[0].arrival.query()', 'while False'),
    ('handed over: nothing that is written is noticed', 'distributed/handoff', 'while self._sending and self._sending[0][1].query()', 'while False'),
    ('handed over: NaN is still taken', 'distributed/handoff', 'for pending, coming in self._leases.items():', 'for pending, coming in ():'),
    ('handed over: an end waits for the folder', 'distributed/handoff', 'self._stream.close(1.)', 'self._stream.close()'),
    ('handed over: an answer sends its prompt', 'core/kv_cache/manager', 'pending.finish_reason is FinishReason.LENGTH and not pending.has_output', 'pending.finish_reason is FinishReason.LENGTH'),
    ('handed over: an aborted prompt is sent', 'core/kv_cache/manager', 'pending.finish_reason is FinishReason.LENGTH and not pending.has_output', 'not pending.has_output'),
    ('handed over: NaN is sent', 'core/kv_cache/manager', 'self.pages_for(pending.input_len) if keep else 0', 'self.pages_for(pending.input_len)'),
    ('apart: an engine for prompts answers', 'server/prefill_router', '[*tried, *self._replicas(True)]', '[*tried]'),
    ('apart: an engine for prompts never answers', 'server/prefill_router', 'with suppress(QueueFull): return Router._choose', 'return Router._choose'),
    ('apart: who wants no answer is sent away', 'server/prefill_router', 'o.params.max_tokens == 0 or ', ''),
    ('apart: who wants logprobs of the prompt is sent away', 'server/prefill_router', ' or o.params.prompt_logprobs is not None', ''),
    ('apart: short prompts are sent away', 'server/prefill_router', 'bool(misses) and min(misses) >= self.least_tokens', 'bool(misses)'),
    ('apart: the dead count', 'server/prefill_router', 'self._replicas(False) if o.available', 'self._replicas(False)'),
    ('apart: a prompt has no tenant', 'server/prefill_router', 'extra_key=request.params.extra_key', 'extra_key=None'),
    ('apart: a prompt has no priority', 'server/prefill_router', 'priority=request.params.priority', 'priority=0'),
    ('apart: who is refused elsewhere fails', 'server/prefill_router', 'except RequestError: pass', 'except ZeroDivisionError: pass'),
    ('apart: a prompt counts for ever', 'server/prefill_router', 'finally: replica.load.ended(request.rid)', 'finally: pass'),
    ('apart: an abort elsewhere is no end', 'server/prefill_router', 'self._rids[request.rid] = True', 'pass'),
    ('apart: who sends no file is asked again', 'server/prefill_router', 'self._rests[replica] = ', '_ = '),
    ('apart: who sent no file is never asked again', 'server/prefill_router', ' if until > now}', '}'),
    ('apart: the frozen are waited for', 'server/prefill_router', 'return not replica.client.alive or ', 'return '),
    ('apart: the aborted wait for a file', 'server/prefill_router', ' or all(self._rids[o.rid] for o in requests)', ''),
    ('apart: who leaves lets a prompt be computed', 'server/prefill_router', 'finally: part.cancel()', 'finally: pass'),
    ('apart: files are never removed', 'server/prefill_router', 'kept.callback(_remove_file, path)', 'pass'),
    ('apart: files stay for the whole answer', 'server/prefill_router', 'if not silent: kept.close()', 'pass'),
    ('apart: an abort between the engines is lost', 'server/prefill_router', 'while aborted := [', 'if aborted := ['),
    ('apart: nothing is handed over', 'server/prefill_router', 'if end: requests = ', 'if False: requests = '),
    ('apart: what was computed a moment ago was cached', 'server/prefill_router', 'cached_tokens=min(output.cached_tokens, cached)', 'cached_tokens=output.cached_tokens'),
    ('apart: half a file stays', 'server/prefill_router', "for each in path.with_suffix('.part'), path:", 'for each in (path,):'),
    ('apart: a late file stays', 'server/prefill_router', 'for delay in 0., PATIENCE:', 'for delay in (0.,):'),
    ('apart: an end shows a traceback', 'server/prefill_router', 'with suppress(RuntimeError): loop', 'loop'),
    ('apart: a pause forgets who is between the engines', 'server/router', " or (command, argument) == ('pause', 'abort')", ''),
    ('apart: an abort of many is one of one', 'server/router', 'rid == start if whole else rid.startswith(start)', 'rid == start'),
    ('router: a newcomer hears commands in any order', 'server/router', 'sent, about = min(missed)', 'sent, about = missed[0]'),
    ('router: one sleeps when another refuses', 'server/router', 'elif refused and (undo := _UNDONE_BY.get(command)):', 'elif refused and (undo := None):'),
    ('router: two models are one server', 'server/router', 'replicas[name].differs.add(about)', 'pass'),
    ('router: who differs does so for ever', 'server/router', 'replicas[name].differs.discard(about)', 'pass'),
    ('router: the aborted begin anew', 'server/router', 'if died and self._rids.get(output.rid):', 'if False:'),
    ('left behind: a process removes the folder of another', 'process', 'flock(fd, LOCK_EX | LOCK_NB)', 'pass'),
    ('left behind: the folder of the dead stays', 'process', 'with suppress(OSError), _locked(left): shutil.rmtree(left, ignore_errors=True)', 'pass'),
    ('left behind: a process leaves its folder', 'process', 'if os.getpid() == pid: shutil.rmtree', 'if False: shutil.rmtree'),
    ('left behind: a fork removes the folder', 'process', 'if os.getpid() == pid: shutil.rmtree', 'if True: shutil.rmtree'),
    ('left behind: a folder is not locked', 'process', 'with _locked(new):', 'with suppress():'),
    ('left behind: a folder of another user is removed', 'process', 'if os.fstat(fd).st_uid != os.geteuid():', 'if False:'),
    ('left behind: a link is followed', 'process', ' | os.O_NOFOLLOW', ''),
    ('apart: nobody is at home', 'server/prefill_router', '.expanduser()', ''),
    ('GPU: half a head too much is computed', 'kernels/fused_heads', 'inside = at < dim // 2', 'inside = at < dim'),
    ('GPU: keys are normalised as queries', 'kernels/fused_heads', '_norm(a, b, k_norm,', '_norm(a, b, q_norm,'),
    ('GPU: a norm is not rounded in between', 'kernels/fused_heads', 'tl.cast(tl.cast(a * scale, kind), tl.float32) * wa', 'a * scale * wa'),
    ('GPU: a row of heads counts in 32 bits', 'kernels/fused_heads', 'tl.program_id(0).to(tl.int64)', 'tl.program_id(0)'),
    ('GPU: angles of the first token', 'kernels/fused_heads', 'cos_sin + token * angle_stride + at,', 'cos_sin + at,'),
    ('GPU: values go where keys go', 'kernels/fused_heads', 'there = values + (slot + (head - n_q - n_kv) * head_stride) + at', 'there = keys + (slot + (head - n_q - n_kv) * head_stride) + at'),
    ('GPU: heads of a slot lie close together', 'kernels/fused_heads', 'keys.stride(0), keys.stride(1),', 'keys.stride(0), dim,'),
    ('GPU: no tokens are launched', 'kernels/fused_heads', '    if not n: return\n', ''),
    ('GPU: fp8 keeps no sign', 'kernels/fused_heads', 'tl.cast(sign | tl.where', 'tl.cast(tl.where'),
    ('GPU: ties of fp8 go up', 'kernels/fused_heads', '(0x7ffff + ((bits >> 20) & 1))', '0x80000'),
    ('GPU: small numbers of fp8 are wrong', 'kernels/fused_heads', 'size < 0.015625', 'size < 0.001'),
    ('GPU: large numbers of fp8 are not cut', 'kernels/fused_heads', '    code = tl.where(size > 448.0, 126, code)\n', ''),
    ('GPU: NaN is hidden in fp8', 'kernels/fused_heads', 'tl.where(x == x, code, 127)', 'code'),
    ('GPU: fp8 is made of what was not rounded', 'kernels/fused_heads', '    a, b = tl.cast(a, qkv.dtype.element_ty), tl.cast(b, qkv.dtype.element_ty)\n    if FP8: a, b = _codes(tl.cast(a, tl.float32)), _codes(tl.cast(b, tl.float32))\n',
     '    if FP8: a, b = _codes(a), _codes(b)\n    else: a, b = tl.cast(a, qkv.dtype.element_ty), tl.cast(b, qkv.dtype.element_ty)\n'),
    ('GPU: a cache of whole numbers is written', 'kernels/gpu_operations', 'if slots and slots.keys.dtype in (self.dtype, FP8):', 'if slots:'),
    ('GPU: angles are rounded', 'kernels/gpu_operations', 'return RotaryAngles(cos_and_sin(positions, freqs, scale), rows)', 'return RotaryAngles(cos_and_sin(positions, freqs, scale).to(dtype), rows)'),
    ('GPU: fp8 is not tried', 'kernels/gpu_operations', 'stored = FP8 if fp8 else torch.bfloat16', 'stored = torch.bfloat16'),
    ('GPU: the order of negative logits', 'kernels/sampling', '((bits >> 15) & 0x7fff)', '0'),
    ('GPU: -0 is less than 0', 'kernels/sampling', 'tl.where(keys == -1, 0, keys)', 'keys'),
    ('GPU: what fills a sweep is counted', 'kernels/sampling', 'if BY_COUNT: amount = tl.cast(at < n, tl.int64)', 'if BY_COUNT: amount = tl.cast(at < BLOCK, tl.int64)'),
    ('GPU: ties of a top-k all share', 'kernels/sampling', 'above + (k - more) * ((weight - above) // tl.maximum(count - more, 1))', 'weight'),
    ('GPU: logits count in 32 bits', 'kernels/sampling', '    row = logits + tl.cast(i, tl.int64) * stride\n    top = tl.cast(tl.load(row + tl.load(likeliest + i)), tl.float32)\n    temperature = tl.cast(tl.load(settings + i), tl.float32)\n    k =',
     '    row = logits + i * stride\n    top = tl.cast(tl.load(row + tl.load(likeliest + i)), tl.float32)\n    temperature = tl.cast(tl.load(settings + i), tl.float32)\n    k ='),
    ('GPU: a number on the end of a chunk', 'kernels/sampling', 'tl.cumsum(parts, 0) <= goal', 'tl.cumsum(parts, 0) < goal'),
    ('GPU: min-p is forgotten', 'kernels/sampling', '(_keys(x) >= key) & (weights >= least)', '_keys(x) >= key'),
    ('GPU: a greedy row is sampled', 'kernels/sampling', '> 0: token = first', '> 2: token = first'),
    ('GPU: settings lie close together', 'kernels/sampling', 'settings, settings.stride(0), n,', 'settings, rows, n,'),
    ('GPU: rows of logits lie close together', 'kernels/sampling', 'n, logits.stride(0)', 'n, n'),
    ('GPU: logits that lie apart are sampled', 'kernels/gpu_operations', ' or logits.stride(-1) != 1', ''),
    ('GPU: logits of 32 bits are sampled', 'kernels/gpu_operations', 'if logits.dtype != self.dtype or logits.stride(-1) != 1', 'if logits.stride(-1) != 1'),
    ('GPU: an expert in use has no tile', 'kernels/grouped_matmul', 'return (n_choices + in_use * (rows - 1)) // rows', 'return n_choices // rows + 1'),
    ('GPU: a tile goes on into the next expert', 'kernels/grouped_matmul', 'begin, tl.sum(tl.where(e == expert, end, 0), 0)', 'begin, begin + ROWS'),
    ('GPU: a tile without an expert computes', 'kernels/grouped_matmul', '    if expert < n_experts:\n        place, column = begin + tl.arange(0, ROWS), tl.arange(0, COLUMNS)\n        column += tl.program_id(1) * COLUMNS\n        mine, wanted = place < end, column < n_out\n        token',
     '    if True:\n        place, column = begin + tl.arange(0, ROWS), tl.arange(0, COLUMNS)\n        column += tl.program_id(1) * COLUMNS\n        mine, wanted = place < end, column < n_out\n        token'),
    ('GPU: columns beyond the matrix', 'kernels/grouped_matmul', 'mask=wanted[:, None] & (columns < width)[None, :]', 'mask=wanted[:, None]'),
    ('GPU: tokens that lie apart', 'kernels/grouped_matmul', 'between, x.contiguous(),', 'between, x,'),
    ('GPU: shares that lie apart', 'kernels/grouped_matmul', 'found.starts, weights.contiguous(),', 'found.starts, weights,'),
    ('GPU: codes of up have the scales of gate', 'kernels/grouped_matmul', 'scales + (row + n_out)', 'scales + row'),
    ('GPU: codes of down are not scaled', 'kernels/grouped_matmul', 'if FP8: total *=', 'if not FP8 and n_in < 0: total *='),
    ('GPU: codes where the device knows none', 'kernels/grouped_matmul', 'torch.cuda.get_device_capability(device) < (8, 9)', 'False'),
    ('GPU: experts of any dtype', 'kernels/grouped_matmul', "if device.type != 'cuda' or dtype not in (torch.bfloat16, torch.float16): return False", "if device.type != 'cuda': return False"),
    ('GPU: the newest page is read too early', 'kernels/page_list', 'mask=column < newest', 'mask=column <= newest + 1'),
    ('GPU: a begun page is not in the table', 'kernels/page_list', '    tl.store(there, pages, mask=column == newest)\n', ''),
    ('GPU: what is not a request page is listed', 'kernels/page_list', 'pages, mask=column <= newest)', 'pages)'),
    ('GPU: a table lies close together', 'kernels/page_list', 'page_table.stride(0), BLOCK', 'page_table.shape[1], BLOCK'),
    ('GPU: fp8 of a row of zeros', 'kernels/fp8', 'tl.max(tl.abs(row), 0) / 448.0, SMALLEST)', 'tl.max(tl.abs(row), 0) / 448.0, 0.0)'),
    ('GPU: rows of fp8 count in 32 bits', 'kernels/fp8', 'i = tl.cast(tl.program_id(0), tl.int64)', 'i = tl.program_id(0)'),
    ('GPU: sizes that no matmul of fp8 has', 'kernels/fp8', 'any(o % 16 for o in self.shape) or ', ''),
    ('GPU: inputs that lie apart are rounded', 'kernels/fp8', ' and x.stride(-1) == 1', ''),
    ('GPU: inputs of any dtype are rounded', 'kernels/fp8', ' and x.dtype == torch.bfloat16', ''),
    ('GPU: old cards multiply fp8', 'kernels/fp8', ' or torch.cuda.get_device_capability(device) < (8, 9)', ''),
    ('GPU: noise chooses a kernel', 'kernels/attention_choice', '* (1 + MARGIN)', ''),
    ('GPU: a kernel that fails stops the engine', 'kernels/trials', 'except Exception as e:\n', 'except ZeroDivisionError as e:\n'),
    ('GPU: the first replay counts', 'kernels/attention_choice', 'return min(times) / RUNS', 'return times[0] / RUNS'),
    ('GPU: a named kernel is measured', 'kernels/attention_choice', "if part in KERNELS[kind]: first = [part]\n    elif", 'if'),
    ('GPU: keys of any dtype are read', 'core/attention/library', 'if stored not in (dtype, torch.float8_e4m3fn):', 'if False:'),
    ('GPU: the next trial is blamed for a crash', 'kernels/trials', 'if accident and left:\n', 'if accident and left[1:]:\n'),
    ('GPU: compiling counts as a hang', 'kernels/trials', 'if has_children(child.pid): compiled += _TICK\n            else: spent', 'spent'),
    ('GPU: who was killed is left out for ever', 'kernels/trials', 'lasts=-code in _FAULTS', 'lasts=True'),
    ('GPU: what does not last is kept', 'kernels/trials', 'if o.lasts}', '}'),
    ('GPU: all shapes are prepared before one is timed', 'kernels/attention_choice', 'for batch in bench.batches[kind]: yield work(batch)', 'yield from [work(o) for o in bench.batches[kind]]'),
    ('callers from vLLM are misunderstood', 'core/scheduler/scheduler', 'params = replace(params, priority=-params.priority)', 'pass'),
]

def make(folder: Path, module: str = '', line: str = '', instead: str = '') -> None:
    "A copy of the project with one line changed; without a module: as it is"
    for name in ('minisgl_lit', 'tests', 'nbs'): shutil.copytree(root/name, folder/name)
    for name in ('settings.ini', 'pyproject.toml', 'setup.py'): shutil.copy(root/name, folder)
    if not module: return
    path = folder/'minisgl_lit'/f'{module}.py'
    text = path.read_text()
    if text.count(line) != 1: raise SystemExit(f'{module}: {line!r} is there {text.count(line)} times, not once')
    path.write_text(text.replace(line, instead))

def wrong(path: Path, folder: Path) -> set[str]:
    "What is wrong in a chapter on the package of a folder: cells whose stored output is another, or its end"
    here = {'PYTHONPATH': str(folder), 'PYTHONDONTWRITEBYTECODE': '1'}
    error, stale, _ = run(folder/path.relative_to(root), package=True, timeout=120, env=here)
    return {'it raises'} if error else {*stale}

@cache
def wrong_anyway(path: Path) -> set[str]:
    "The same on the package as it is: some chapters only hold with functions of their own cells"
    return wrong(path, root)

def failing_chapter(folder: Path, names: list[str]) -> str | None:
    "The first of these chapters that fails on a copy: each a name, or a part of one"
    chosen = (o for o in notebooks() if any(name in chapter(o) for name in names))
    return next((chapter(o) for o in chosen if wrong(o, folder) - wrong_anyway(o) and 'it raises' not in wrong_anyway(o)), None)

def failing_test(folder: Path, files: list[str]) -> str | None:
    "The first test of these files that fails on a copy"
    env = {**os.environ, 'TST_PACKAGE': '1', 'TST_LIVES': '300', 'TST_SHRINK': '0', 'OMP_NUM_THREADS': '1', 'PYTHONDONTWRITEBYTECODE': '1', 'PYTHONPATH': str(folder)}
    found = subprocess.run([sys.executable, '-m', 'pytest', '-qx', '--timeout=120', '-p', 'no:cacheprovider', '-p', 'no:xdist', '-k', 'not every', *files], cwd=folder,
                           env=env, capture_output=True, text=True)
    if found.returncode == 1: return next((o.split(' ')[1].removeprefix('tests/') for o in found.stdout.splitlines() if o.startswith(('FAILED', 'ERROR'))), 'a test that never ends')
    if found.returncode: raise SystemExit(f'the tests did not run\n{found.stdout[-2000:]}{found.stderr[-2000:]}')

def caught_by(mutant: tuple[str, str, str, str]) -> str | None:
    "The first chapter or test that fails on a mutant"
    name, module, line, instead = mutant
    callers = ROUTED if module in ('process', 'distributed/handoff') or module.startswith('server/') else []
    own = chapters[module].split(' or ')
    above = [] if module.startswith(gpu) else [part for o in chapters.values() if o > chapters[module] for part in o.split(' or ')]
    with tempfile.TemporaryDirectory() as found:
        folder = Path(found)
        make(folder, module, line, instead)
        return failing_chapter(folder, own) or failing_chapter(folder, above) or failing_test(folder, KERNELS if module.startswith(gpu) else callers + LIVES)

def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('-k', default='', help='only those whose name has this in it')
    parser.add_argument('-j', type=int, default=2, help='how many at once')
    args = parser.parse_args()
    chosen = [o for o in mutants if args.k in o[0]]
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        if test := failing_test(Path(folder), [*KERNELS, *ROUTED, *LIVES]): raise SystemExit(f'{test} fails without a mutant')
    with ThreadPoolExecutor(args.j) as pool:
        found = []
        for mutant, test in zip(chosen, pool.map(caught_by, chosen)):
            found.append(test)
            print(f'{mutant[1]:18} {mutant[0]:52} {test or "SURVIVED"}', flush=True)
    print(f'{len(found) - found.count(None)} of {len(found)} mutants caught')
    return int(None in found)

if __name__ == '__main__': sys.exit(main())
