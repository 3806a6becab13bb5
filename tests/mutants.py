"""Break the caches and the scheduler one line at a time: some test must notice each break.

    python tests/mutants.py               all of them, two at a time
    python tests/mutants.py -k lock       those whose name has this in it

A mutant is a copy of the package with one line changed. Its own chapter's tests run first, on the copy, then
random lives of a server and of the tree. Whoever survives is named, and the exit code is 1: write the test that
is missing. A line that is no longer there is an error too.
"""
import argparse, os, shutil, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

root = Path(__file__).resolve().parents[1]
chapters = {'kv_cache/table': '11_kv_cache.table', 'kv_cache/eviction': '11a_kv_cache.eviction', 'kv_cache/radix': '12_kv_cache.radix', 'kv_cache/events': '12a_kv_cache.events',
            'kv_cache/page_file': '12b_kv_cache.page_file', 'kv_cache/tier': '12c_kv_cache.tier', 'kv_cache/manager': '13_kv_cache.manager',
            'scheduler/fairness': '19a_scheduler.fairness', 'scheduler/policy': '20_scheduler.policy', 'scheduler/prefill': '21_scheduler.prefill',
            'scheduler/decode': '22_scheduler.decode', 'scheduler/lifecycle': '23_scheduler.lifecycle', 'scheduler/batch': '24_scheduler.batch',
            'scheduler/scheduler': '25_scheduler.scheduler', 'scheduler/control': '26_scheduler.control'}

mutants = [   # what breaks, module, the line, what becomes of it
    ('a row is allocated twice', 'kv_cache/table', 'row = self._free.pop()', 'row = self._free[-1]'),
    ('a row freed twice is not noticed', 'kv_cache/table', 'if row not in self._allocated:', 'if False:'),
    ('the dummy row is allocated', 'kv_cache/table', 'reversed(range(max_running_req))', 'reversed(range(max_running_req + 1))'),
    ('a device never learns of new pages', 'kv_cache/table', 'self._changed.append((rows, cols))', 'pass'),
    ('slots forget the offset in the page', 'kv_cache/table', 'positions + (self.pages[rows, cols] - cols) * self.page_size', 'self.pages[rows, cols] * self.page_size'),
    ('tokens that differ count as common', 'kv_cache/radix', 'differ = a[:n] != b[:n]', 'differ = a[:n] > b[:n]'),
    ('common pages are rounded up', 'kv_cache/radix', 'return int(differ.argmax() if differ.any() else n) // page_size',
     'return -(-int(differ.argmax() if differ.any() else n) // page_size)'),
    ('a split forgets the locks', 'kv_cache/radix', 'children={}, entry_no=0)', 'children={}, entry_no=0, locks=0)'),
    ('a split leaves the old parent', 'kv_cache/radix', 'node.pages[n_pages:], head', 'node.pages[n_pages:], node.parent'),
    ('a locked leaf is offered for eviction', 'kv_cache/radix', 'if node.locks or node.children or node is self.root: return',
     'if node.children or node is self.root: return'),
    ('an inner node is offered for eviction', 'kv_cache/radix', 'if node.locks or node.children or node is self.root: return',
     'if node.locks or node is self.root: return'),
    ('a parent is not offered when its last child went', 'kv_cache/radix', 'self._offer(parent)', 'pass'),
    ('the tree shares the array of the caller', 'kv_cache/radix', 'np.array(ids, dtype=np.int32), np.array(pages, dtype=np.int32)', 'np.asarray(ids, dtype=np.int32), np.asarray(pages, dtype=np.int32)'),
    ('use does not count for the eviction order', 'kv_cache/radix', 'self._step += 1', 'pass'),
    ('a lock does not protect', 'kv_cache/radix', 'self._add_locks(handle.path, 1, handle.priority)', 'self._add_locks([], 1, handle.priority)'),
    ('an unlock is forgotten', 'kv_cache/radix', 'self._add_locks(handle.path, -1, handle.priority)', 'self._add_locks([], -1, handle.priority)'),
    ('what was found before it ran is not counted', 'kv_cache/radix', 'for node in handle.path + below if first else below: node.hits += 1', 'for node in below: node.hits += 1'),
    ('a user of importance makes no difference', 'kv_cache/radix', 'if priority > node.priority: node.priority = priority', 'pass'),
    ('the last user decides the importance', 'kv_cache/radix', 'if priority > node.priority: node.priority = priority', 'node.priority = priority'),
    ('a head keeps the tokens of its tail alive', 'kv_cache/radix', 'key=node.key[:n].copy()', 'key=node.key[:n]'),
    ('a head keeps the pages of its tail alive', 'kv_cache/radix', 'pages=node.pages[:n_pages].copy()', 'pages=node.pages[:n_pages]'),
    ('what was hidden waits for its old turn', 'kv_cache/radix', 'node.invalid = True\n            self._offer(node)', 'node.invalid = True'),
    ('nobody is told of a new leaf', 'kv_cache/radix', 'self.observer.stored(leaf)', 'pass'),
    ('nobody is told of evictions', 'kv_cache/radix', 'self.observer.removed(cut)', 'pass'),
    ('nobody is told of what was hidden', 'kv_cache/radix', 'self.observer.removed(node.pages)', 'pass'),
    ('what was taken back is told', 'kv_cache/events', 'if self._changes.pop(block, stored) == stored: self._changes[block] = stored', 'self._changes[block] = stored'),
    ('a lost batch is not noticed', 'kv_cache/events', 'self.complete &= events.number == self._number + 1', 'pass'),
    ('nothing waits for a launched batch', 'kv_cache/manager', 'ready = [items for step, items in self._waiting if step <= completed]',
     'ready = [items for step, items in self._waiting]'),
    ('what waits is lost', 'kv_cache/manager', 'self._waiting = [entry for entry in self._waiting if entry[0] > completed]', 'self._waiting = []'),
    ('all of the prompt is matched', 'kv_cache/manager', 'matchable_len = pending.matchable_len', 'matchable_len = pending.n_tokens'),
    ('pages are rounded down', 'kv_cache/manager', 'return -(-n_tokens // self.page_size)', 'return n_tokens // self.page_size'),
    ('a row goes on pointing at a freed duplicate', 'kv_cache/manager', 'self.table.write(np.full(len(duplicates), row), first + duplicates, cached[duplicates])', 'pass'),
    ('a duplicate is free at once', 'kv_cache/manager', 'self._release(own[duplicates], self._launched(pending))', 'self._release(own[duplicates], 0)'),
    ('pages of the ended are free at once', 'kv_cache/manager', 'self._release(self._own_pages(pending), launched)', 'self._release(self._own_pages(pending), 0)'),
    ('locks of the ended are given up at once', 'kv_cache/manager', 'self._unlocking.put([handle], launched)',
     'self._unlocking.put([handle], 0)'),
    ('tokens that the host does not know are inserted', 'kv_cache/manager', 'n_tokens = min(self._cached_len(pending), n_known)', 'n_tokens = self._cached_len(pending)'),
    ('the last token is trusted', 'kv_cache/manager', 'pending.n_tokens - 1)', 'pending.n_tokens)'),
    ('tokens that are not computed are inserted', 'kv_cache/manager', 'n_tokens = min(self._cached_len(pending), n_known)', 'n_tokens = n_known'),
    ('a retraction frees nothing', 'kv_cache/manager', 'return own + self.prefix.freed_by([_locked_prefix(p) for p in pendings])', 'return 0'),
    ('a retraction frees only its own pages', 'kv_cache/manager', 'return own + self.prefix.freed_by([_locked_prefix(p) for p in pendings])', 'return own'),
    ('the tree is not checked', 'kv_cache/manager', '    self.prefix.check_integrity()\n', '    pass\n'),
    ('what failed is cached', 'kv_cache/manager', 'if keep: self._insert_prefix', 'if True: self._insert_prefix'),
    ('invalid pages are matched by others', 'kv_cache/manager', 'self.prefix.invalidate(_locked_prefix(pending))', 'pass'),
    ('prefixes of other namespaces are matched', 'kv_cache/manager', 'params.extra_key, params.priority)', 'None, params.priority)'),
    ('evicted pages are forgotten', 'kv_cache/manager', 'self._push(evicted)', 'pass'),
    ('waiting pages do not count as available', 'kv_cache/manager', 'return self.ready_size + self.releasing.size', 'return self.ready_size'),
    ('room is compared before the lock', 'scheduler/prefill', 'self.cache.lock(handle)\n        needed', 'needed'),
    ('a refused request keeps its lock', 'scheduler/prefill', 'self.cache.unlock(handle)\n            self.closed', 'self.closed'),
    ('pages are not reserved', 'scheduler/prefill', 'self.reserved_pages += self._pages_left(pending, start)', 'pass'),
    ('running requests have no reservation', 'scheduler/scheduler', 'self.prefill.schedule(self.decode.inflight_pages, mixed_decode_tokens)', 'self.prefill.schedule(0, mixed_decode_tokens)'),
    ('tokens are reserved, not pages', 'scheduler/decode', '-(-ends // self.page_size) - -(-lens // self.page_size)',
     '(ends - lens) // self.page_size'),
    ('the chunked request waits its turn', 'scheduler/prefill', 'self._start(adder, self.chunked) if self.chunked else []', 'self._start(adder, self.chunked) if self.chunked and not self.waiting else []'),
    ('two requests are in chunks at once', 'scheduler/prefill', 'self.may_cut, self.closed = self.may_cut and prompt_ends,', 'self.may_cut, self.closed = True,'),
    ('a batch ends with its chunk', 'scheduler/prefill', 'if adder.closed: break', 'if adder.closed or self.chunked: break'),
    ('a step may compute any number of tokens', 'scheduler/prefill', 'self.may_cut and prompt_ends, self.token_budget <= 0', 'self.may_cut and prompt_ends, False'),
    ('requests that lack pages are passed over', 'scheduler/prefill', 'self.cache.unlock(handle)\n            self.closed = True', 'self.cache.unlock(handle)'),
    ('a prompt that must wait ends the batch', 'scheduler/prefill', 'self.closed = not self._pass_over(pending, handle)', 'self.closed = True'),
    ('what is cached makes no prompt shorter', 'scheduler/prefill', 'pending.n_tokens - handle.cached_len > limit', 'pending.n_tokens > limit'),
    ('a prompt passed over keeps no pages', 'scheduler/prefill', 'self.reserved_rows = self.reserved_pages + available - left, 1', 'self.reserved_rows = self.reserved_pages, 1'),
    ('a prompt passed over keeps no row', 'scheduler/prefill', 'self.reserved_rows = self.reserved_pages + available - left, 1', 'self.reserved_rows = self.reserved_pages + available - left, 0'),
    ('the row that is kept is given away', 'scheduler/prefill', 'if self.table.available_size <= self.reserved_rows:', 'if not self.table.available_size:'),
    ('all that are passed over keep pages', 'scheduler/prefill', 'if not self.passed_over:', 'if True:'),
    ('a prompt passed over keeps its pages, and not its match', 'scheduler/prefill', 'available = self.cache.available_size\n            self.cache.lock(handle)', 'self.cache.lock(handle)\n            available = self.cache.available_size'),
    ('a prompt passed over keeps its lock', 'scheduler/prefill', 'self.cache.unlock(handle)\n            if left', 'if left'),
    ('a prompt without room is passed over', 'scheduler/prefill', 'if left < self.reserved_pages: return False', 'pass'),
    ('any number of prompts is passed over', 'scheduler/prefill', 'if self.passed_over == self.max_passed_over: return False', 'pass'),
    ('the queue is tried at every chunk', 'scheduler/prefill', 'if adder.closed or self.blocked and not any(map(gt, room, self._blocked_at)): return reqs', 'if adder.closed: return reqs'),
    ('the policy is asked for nothing', 'scheduler/prefill', 'if adder.closed or self.blocked and', 'if self.blocked and'),
    ('the queue stays blocked when a prompt may be cut', 'scheduler/prefill', 'self.cache.table.available_size, pages, adder.may_cut', 'self.cache.table.available_size, pages'),
    ('the queue stays blocked by one that left', 'scheduler/prefill', 'if any(queue.pop(pending.rid, None) for queue in queues): self.blocked = None', 'any(queue.pop(pending.rid, None) for queue in queues)'),
    ('a chunk is sampled', 'scheduler/prefill', 'prompt_ends = end == pending.n_tokens', 'prompt_ends = True'),
    ('the row keeps the cached length of its last owner', 'scheduler/prefill', 'self.lengths.cached_len[row] = handle.cached_len', 'pass'),
    ('stop tokens are not watched', 'scheduler/prefill', 'ends = pending.params.stop_token_ids, pending.stop_check, pending.grammar', 'ends = pending.grammar,'),
    ('grammars are not watched', 'scheduler/prefill', 'ends = pending.params.stop_token_ids, pending.stop_check, pending.grammar', 'ends = pending.params.stop_token_ids, pending.stop_check'),
    ('grammars do not accept tokens', 'scheduler/lifecycle', 'complete = pending.grammar.accept(token) if pending.grammar else False', 'complete = False'),
    ('a mask comes a token late', 'scheduler/scheduler', '        forwarded = self._launch(batch) if batch else None\n        self._drain()\n', '        forwarded = self._launch(batch) if batch else None\n        mask = self._grammar_mask(batch) if batch else None\n        self._grammar_mask = lambda batch: mask\n        self._drain()\n'),
    ('decode runs past the end', 'scheduler/decode', 'if stays.all(): return', 'return'),
    ('the rows are not made anew when one leaves', 'scheduler/decode', 'if self.running.pop(rid, None): self._rows = None', 'self.running.pop(rid, None)'),
    ('only one end-of-sequence token counts', 'scheduler/lifecycle', 'token in eos_token_ids and', 'token == min(eos_token_ids, default=None) and'),
    ('length is checked one token late', 'scheduler/lifecycle', 'if pending.n_tokens == pending.max_len', 'if pending.n_tokens == pending.max_len + 1'),
    ('no row is watched', 'scheduler/lifecycle', 'is_eos[tokens] | lengths.watched[rows] |', 'is_eos[tokens] |'),
    ('a page is allocated that is there already', 'scheduler/batch', 'self.first_pages = -(-self.cached_lens // page_size)',
     'self.first_pages = self.cached_lens // page_size'),
    ('a batch shows the lengths of later steps', 'scheduler/batch', 'self.cached_lens, self.device_lens = lengths.cached_len[rows], lengths.device_len[rows]',
     'self.cached_lens, self.device_lens = lengths.cached_len[rows], lengths.device_len[:len(reqs)]'),
    ('pages that are only being released are allocated', 'scheduler/scheduler', 'if plan.new_pages > self.cache.ready_size:', 'if False:'),
    ('a token after the end is output', 'scheduler/lifecycle', 'if pending.ended: return\n        if not finite', 'if not finite'),
    ('an abort in flight is forgotten', 'scheduler/lifecycle', 'if pending.to_finish: return self.finish(pending, *pending.to_finish)', 'pass'),
    ('rows are free at once', 'scheduler/lifecycle', 'self._rows_releasing.put([row], int(self.table.lengths.launched[row]))', 'self._rows_releasing.put([row], 0)'),
    ('rows are never free', 'scheduler/lifecycle', 'self.table.free(row)', 'pass'),
    ('a prompt is inserted into the tree twice', 'scheduler/lifecycle', 'self._to_cache, self._to_release = [], []', 'self._to_release = []'),
    ('nothing is inserted into the tree before the end', 'scheduler/scheduler', 'self._to_cache = [o.pending for o in batch.reqs if o.rid not in running]', 'pass'),
    ('what failed stays in the tree', 'scheduler/lifecycle', 'self.cache.flush()', 'pass'),
    ('after a failure batches are still in flight', 'scheduler/scheduler', 'self.completed = self._flush_after = self.launched ', 'self._flush_after = self.launched '),
    ('the batch after a failed one is awaited', 'scheduler/scheduler', 'if batch and batch.step > self.completed:', 'if batch:'),
    ('a rid is used twice', 'scheduler/lifecycle', 'if rid in self.alive:', 'if False:'),
    ('a request that can never fit is accepted', 'scheduler/prefill', 'longest = min(self.max_seq_len, self.slots + 1)', 'longest = min(self.max_seq_len, self.slots + 99)'),
    ('a request to recompute outputs its tokens', 'scheduler/lifecycle', 'if pending in self._to_recompute: return\n        if not finite:', 'if not finite:'),
    ('a request is recomputed while in flight', 'scheduler/lifecycle', 'landed = [o for o in alive if lengths.launched[o.table_idx] <= self.completed]', 'landed = alive'),
    ('a request that fails by its cached prefix ends', 'scheduler/lifecycle', '        self._mark_to_recompute(pending)\n        pending.shares_cache = False', '        pending.shares_cache = False'),
    ('a stale entry is evicted', 'kv_cache/eviction', 'if entry_no != item.entry_no: continue', 'pass'),
    ('a rank that rose by itself is not noticed', 'kv_cache/eviction', 'if (*rank,) == self.rank(item): return item', 'return item'),
    ('what is invalid waits for its turn', 'kv_cache/eviction', 'return (-math.inf,) if item.invalid else self._policy(item)', 'return self._policy(item)'),
    ('stale entries are never swept out', 'kv_cache/eviction', 'if len(self.entries) > self.sweep_at: self._sweep()', 'pass'),
    ('what is exchanged for another\'s does not count as borrowed', 'kv_cache/radix', 'if n: handle.borrowed = True', 'pass'),
    ('what is found does not count as borrowed', 'kv_cache/radix', 'priority, borrowed=n > 0)', 'priority)'),
    ('who begins anew by itself finds the same', 'kv_cache/manager', 'if pending.shares_cache:', 'if True:'),
    ('a request recomputed without the cache shares', 'scheduler/lifecycle', 'keep=pending.shares_cache and not pending.kv_invalid', 'keep=not pending.kv_invalid'),
    ('a retracted request goes to the end of the queue', 'scheduler/lifecycle', 'self.prefill.requeue(pending, at_head)', 'self.prefill.requeue(pending, False)'),
    ('a retracted request keeps its row', 'scheduler/lifecycle', 'self._release_request(pending)\n        self._collect()\n        self.prefill', 'self.prefill'),
    ('a preempted request is in the batch all the same', 'scheduler/scheduler', 'reqs = [] if too_long or self._flush_after else self._select_prefill(mixed_decode_tokens)\n        running = self.decode.schedule() ', 'running = self.decode.schedule()\n        reqs = [] if too_long or self._flush_after else self._select_prefill(mixed_decode_tokens) '),
    ('no request is retracted', 'scheduler/scheduler', 'if plan.new_pages <= self.cache.ready_size: return plan', 'return plan'),
    ('the last one is retracted too', 'scheduler/scheduler', 'if len(victims) > 1 or mode is not ForwardMode.DECODE: self.retract(victims[0])', 'if True: self.retract(victims[0])'),
    ('the new token ratio never adapts', 'scheduler/decode', 'seen = expected / (max_new_tokens.sum() + 1)', 'seen = 0'),
    ('the clip is forgotten', 'scheduler/decode', 'np.ceil(clipped * self.ratio)', 'np.ceil(left * self.ratio)'),
    ('most tokens made are retracted first', 'scheduler/decode', 'return sorted(order, key=lambda req: len(req.output_ids))', 'return sorted(order, key=lambda req: -len(req.output_ids))'),
    ('a pause does not hold', 'scheduler/scheduler', 'if self.paused: return None', 'pass'),
    ('the prefill streak is not bounded', 'scheduler/scheduler', 'reqs = [] if too_long or self._flush_after', 'reqs = [] if self._flush_after'),
    ('every request is preempted', 'scheduler/scheduler', 'if o.params.priority < limit', 'if True'),
    ('timeouts never expire', 'scheduler/lifecycle', 'while self._queue and self._queue[0][0] <= now:', 'while False:'),
    ('an abort ends at once', 'scheduler/lifecycle', 'in_flight = row is not None and lengths.launched[row] > self.completed', 'in_flight = False'),
    ('an aborted request is launched again', 'scheduler/lifecycle', 'pending.to_finish = pending.to_finish or (reason, error)\n        self.prefill.remove(pending)\n        self.decode.remove_req(pending.rid)', 'pending.to_finish = pending.to_finish or (reason, error)\n        self.prefill.remove(pending)'),
    ('an aborted prompt goes on', 'scheduler/lifecycle', 'pending.to_finish = pending.to_finish or (reason, error)\n        self.prefill.remove(pending)', 'pending.to_finish = pending.to_finish or (reason, error)'),
    ('callers get answers for nothing', 'scheduler/fairness', 'self.output_cost * (pending.n_tokens - pending.input_len)', '0'),
    ('callers pay for what is cached', 'scheduler/fairness', 'self.prompt_cost * (pending.input_len - pending.cached_tokens)', 'self.prompt_cost * pending.input_len'),
    ('callers have no weight', 'scheduler/fairness', '(cost - before) / weight', 'cost - before'),
    ('callers pay once more in each pass', 'scheduler/fairness', 'self._charged[pending] = cost', 'pass'),
    ('callers are charged a pass late', 'scheduler/fairness', '            yield pending\n            self._charge(pending)', '            yield pending'),
    ('callers save up while they are idle', 'scheduler/fairness', 'max(self.served.get(member, 0.), self._floor)', 'self.served.get(member, 0.)'),
    ('callers are forgiven when they come again', 'scheduler/fairness', 'max(self.served.get(member, 0.), self._floor)', 'self._floor'),
    ('callers are remembered for ever', 'scheduler/fairness', 'self._forget(members.keys())', 'pass'),
    ('callers hold what has ended', 'scheduler/fairness', 'if pending.finish_reason or not cost:', 'if not cost:'),
    ('callers share nothing among their users', 'scheduler/fairness', 'self.users[name].add(user, cost - before)', 'pass'),
    ('callers preempt each other', 'scheduler/policy', 'return head.caller[:2] == running.caller[:2]', 'return True'),
    ('callers may fill the queue', 'scheduler/policy', 'return _least_important(queues[most])', 'return None'),
    ('callers are displaced by wrong requests', 'scheduler/lifecycle', '        self._make_room(pending)\n', ''),
    ('below: a damaged page is believed', 'kv_cache/page_file', 'found == key and n == out.nbytes and digest(key, out) == right', 'found == key and n == out.nbytes'),
    ('below: half a page is believed', 'kv_cache/page_file', 'return blake2b(data.data, key=key, digest_size=KEY_BYTES).digest()', 'return blake2b(data[:1], key=key, digest_size=KEY_BYTES).digest()'),
    ('below: two engines write one file', 'kv_cache/page_file', 'flock(fd, LOCK_EX | LOCK_NB)', 'pass'),
    ('below: a link is followed', 'kv_cache/page_file', ' | os.O_NOFOLLOW', ''),
    ('below: anything is opened for a file', 'kv_cache/page_file', 'if about.st_uid != os.geteuid() or not S_ISREG(about.st_mode):', 'if False:'),
    ('below: others may read', 'kv_cache/page_file', 'with suppress(OSError): os.fchmod(fd, 0o600)', 'pass'),
    ('below: any number of a write is believed', 'kv_cache/page_file', 'if 0 < number < _MOST_WRITES:', 'if number:'),
    ('below: pages of another size are read', 'kv_cache/page_file', 'os.ftruncate(self._fd, 0)', 'pass'),
    ('below: the newest slot is given away', 'kv_cache/page_file', 'self._slot_of.popitem(last=False)', 'self._slot_of.popitem()'),
    ('below: a forgotten slot is lost', 'kv_cache/page_file', 'if slot is not None: self._free.append(slot)', 'pass'),
    ('below: a write counts as an old one after a restart', 'kv_cache/page_file', 'by_age[-1][0] if by_age else 0', '0'),
    ('below: tenants share keys', 'kv_cache/events', 'blake2b(fingerprint + repr(extra_key).encode(),', 'blake2b(fingerprint,'),
    ('below: what comes before does not matter', 'kv_cache/events', 'blake2b(before + data[i - size:i],', 'blake2b(data[i - size:i],'),
    ('below: weights do not matter', 'kv_cache/events', 'blake2b(fingerprint + repr(extra_key).encode(),', 'blake2b(repr(extra_key).encode(),'),
    ('below: a split leaves the keys', 'kv_cache/radix', 'if node.keys: node.keys = node.keys[n_pages:]', 'pass'),
    ('below: what is invalid is kept', 'kv_cache/tier', '        if node.invalid: return\n', ''),
    ('below: the first pages are dropped, not the last', 'kv_cache/tier', 'if new := new[:n]:', 'if new := new[max(len(new) - n, 0):]:'),
    ('below: pages of the wrong end are kept', 'kv_cache/tier', 'node.pages[keep:][new]', 'node.pages[new]'),
    ('below: any number of pages moves', 'kv_cache/tier', 'n = max(self.room, 0)', 'n = len(new)'),
    ('below: a lock does not keep an entry', 'kv_cache/tier', 'if entry.locks or self._host.get(entry.key) is not entry: return', 'if self._host.get(entry.key) is not entry: return'),
    ('below: what rests is never dropped', 'kv_cache/tier', 'while len(self._rest) > self.host_pages:', 'while False:'),
    ('below: a page is used before it has arrived', 'kv_cache/tier', 'return not all(entry.lost or entry.arrival.query() for entry in lease.entries)', 'return False'),
    ('below: what is lost is waited for', 'kv_cache/tier', 'entry.lost or entry.arrival.query()', 'entry.arrival.query()'),
    ('below: a disk that hangs is waited for', 'kv_cache/tier', 'if self.disk_hangs and not self._rising[-1][0].lost: self._give_up()', 'pass'),
    ('below: a disk that hangs is asked for more', 'kv_cache/tier', 'lost = entry.lost if entry else self.disk_hangs', 'lost = entry and entry.lost'),
    ('below: a file is closed under a write', 'kv_cache/tier', 'self._stream.submit(self._file.close)', 'self._file.close()'),
    ('below: an end waits for the disk', 'kv_cache/tier', 'self._stream.close(max(end - self._clock(), 0.))', 'self._stream.close()'),
    ('below: an end leaves the tree', 'kv_cache/manager', 'if self.tier: self.tier.close(evict)', 'if self.tier: self.tier.close()'),
    ('below: an end is in a hurry', 'kv_cache/tier', '(evict(self.room) or self._leaving or self._writing) and', 'evict(self.room) and'),
    ('below: a read that failed is believed', 'kv_cache/tier', 'if not file.read(slot, key, data): entry.lost = True', 'file.read(slot, key, data)'),
    ('below: a copy that failed is believed', 'kv_cache/tier', 'except BaseException: self.lost = True ', 'except BaseException: pass '),
    ('below: a gap is filled with what follows', 'kv_cache/tier', 'if lease is None or start < lease.first:\n            self', 'if lease is None:\n            self'),
    ('below: a longer match shifts the pages', 'kv_cache/tier', 'lease.entries[start - lease.first:]', 'lease.entries'),
    ('below: a lease is never dropped', 'kv_cache/manager', 'if source := self._source(pending): source.drop(pending)', 'pass'),
    ('below: nothing is dropped by whoever leaves the queue', 'scheduler/prefill', '        self.cache.drop(pending)\n', ''),
    ('below: emptied pages are still taken', 'kv_cache/tier', 'for entry in self._host.values(): entry.lost = True', 'pass'),
    ('below: an emptied file keeps its pages', 'kv_cache/tier', 'if self._file: self._stream.submit(self._file.erase)', 'pass'),
    ('below: new weights read pages of old ones', 'scheduler/control', 's.cache.renew()', 'pass'),
    ('below: who waits keeps pages of old weights', 'kv_cache/tier', 'for pending in [*self._leases]: self.drop(pending)', 'pass'),
    ('below: NaN stays on the disk', 'kv_cache/manager', 'for below in self._below: below.clear()', 'pass'),
    ('below: what came up does not count as borrowed', 'kv_cache/manager', 'handle.borrowed, self.table.lengths.cached_len[row] = True, end * self.page_size', 'self.table.lengths.cached_len[row] = end * self.page_size'),
    ('below: what comes up is not in the row', 'kv_cache/manager', 'self.table.write(np.full(len(pages), row), np.arange(first, end), pages)', 'pass'),
    ('below: what comes up is not copied', 'kv_cache/manager', 'source.copies.write_pages(pages, data)', 'pass'),
    ('below: who shares nothing finds pages', 'kv_cache/manager', 'if not source or not pending.shares_cache: return False', 'if not source: return False'),
    ('below: the last token comes up, too', 'kv_cache/manager', 'handle.cached_len, pending.matchable_len)', 'handle.cached_len, pending.n_tokens)'),
    ('below: who waits for pages starts at once', 'scheduler/prefill', 'if self.cache.arriving(pending, handle):', 'if self.cache.arriving(pending, handle) and False:'),
    ('below: who waits for pages blocks the queue', 'scheduler/prefill', 'blocked = len(reqs) == n_chunked and not self.travelling', 'blocked = len(reqs) == n_chunked'),
    ('below: that all wait for pages looks like a deadlock', 'scheduler/scheduler', 'elif stood_still and self.prefill.travelling: self.cache.idle()', 'elif False: pass'),
    ('below: nothing that has arrived is noticed', 'kv_cache/manager', 'for below in self._below: below.collect()', 'pass'),
    ('callers from vLLM are misunderstood', 'scheduler/lifecycle', 'params = replace(params, priority=-params.priority)', 'pass'),
]

def make(folder: Path, module: str, line: str, instead: str) -> None:
    "A copy of the project with one line changed"
    for name in ('minisgl_lit', 'tests', 'nbs'): shutil.copytree(root/name, folder/name, ignore=shutil.ignore_patterns('__pycache__', '*.safetensors', '3*', '5*'))
    for name in ('settings.ini', 'pyproject.toml', 'setup.py'): shutil.copy(root/name, folder)
    path = folder/'minisgl_lit'/f'{module}.py'
    text = path.read_text()
    if text.count(line) != 1: raise SystemExit(f'{module}: {line!r} is there {text.count(line)} times, not once')
    path.write_text(text.replace(line, instead))

def caught_by(mutant: tuple[str, str, str, str]) -> str | None:
    "The first test that fails on a mutant"
    name, module, line, instead = mutant
    env = {**os.environ, 'TST_PACKAGE': '1', 'TST_LIVES': '300', 'TST_SHRINK': '0', 'OMP_NUM_THREADS': '1', 'PYTHONDONTWRITEBYTECODE': '1'}
    above = [o for o in chapters.values() if o > chapters[module]]
    tries = [['tests/test_notebooks.py', '-k', chapters[module]],
             ['tests/test_hostile_callers.py', 'tests/test_radix.py', 'tests/test_scheduler.py', 'tests/test_hostile_chunks.py', '-k', 'not every'],
             ['tests/test_notebooks.py', '-k', ' or '.join(above) or 'none']]
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), module, line, instead)
        for args in tries:
            found = subprocess.run([sys.executable, '-m', 'pytest', '-qx', '--timeout=120', '-p', 'no:cacheprovider', '-p', 'no:xdist', *args], cwd=folder,
                                   env={**env, 'PYTHONPATH': folder}, capture_output=True, text=True)
            if found.returncode == 1: return next((o.split(' ')[1].removeprefix('tests/') for o in found.stdout.splitlines() if o.startswith(('FAILED', 'ERROR'))), 'a test that never ends')
            if found.returncode not in (0, 5): raise SystemExit(f'{name}: the tests did not run\n{found.stdout[-2000:]}{found.stderr[-2000:]}')

def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('-k', default='', help='only those whose name has this in it')
    parser.add_argument('-j', type=int, default=2, help='how many at once')
    args = parser.parse_args()
    chosen = [o for o in mutants if args.k in o[0]]
    with ThreadPoolExecutor(args.j) as pool:
        found = []
        for mutant, test in zip(chosen, pool.map(caught_by, chosen)):
            found.append(test)
            print(f'{mutant[1]:18} {mutant[0]:52} {test or "SURVIVED"}', flush=True)
    print(f'{len(found) - found.count(None)} of {len(found)} mutants caught')
    return int(None in found)

if __name__ == '__main__': sys.exit(main())
