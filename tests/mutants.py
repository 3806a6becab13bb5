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
chapters = {'kv/table': '11_kv.table', 'kv/prefix': '12_kv.prefix', 'kv/cache': '13_kv.cache', 'scheduler/prefill': '21_scheduler.prefill',
            'scheduler/decode': '22_scheduler.decode', 'scheduler/finish': '23_scheduler.finish', 'scheduler/prepare': '24_scheduler.prepare',
            'scheduler/loop': '25_scheduler.loop', 'scheduler/control': '26_scheduler.control'}

mutants = [   # what breaks, module, the line, what becomes of it
    ('a row is lent twice', 'kv/table', 'row = self._free.pop()', 'row = self._free[-1]'),
    ('a row freed twice is not noticed', 'kv/table', 'if row not in self._lent:', 'if False:'),
    ('the dummy row is lent', 'kv/table', 'reversed(range(max_running_req))', 'reversed(range(max_running_req + 1))'),
    ('a device never learns of new pages', 'kv/table', 'self._changed.append((rows, cols))', 'pass'),
    ('slots forget the offset in the page', 'kv/table', 'positions + (self.pages[rows, cols] - cols) * self.page_size', 'self.pages[rows, cols] * self.page_size'),
    ('tokens that differ count as common', 'kv/prefix', 'differ = a[:n] != b[:n]', 'differ = a[:n] > b[:n]'),
    ('common pages are rounded up', 'kv/prefix', 'return int(differ.argmax() if differ.any() else n) // page_size',
     'return -(-int(differ.argmax() if differ.any() else n) // page_size)'),
    ('a split forgets the locks', 'kv/prefix', 'children={}, entry_no=0)', 'children={}, entry_no=0, locks=0)'),
    ('a split leaves the old parent', 'kv/prefix', 'node.pages[n_pages:], head', 'node.pages[n_pages:], node.parent'),
    ('a locked leaf is offered for eviction', 'kv/prefix', 'if node.locks or node.children or node is self.root: return',
     'if node.children or node is self.root: return'),
    ('an inner node is offered for eviction', 'kv/prefix', 'if node.locks or node.children or node is self.root: return',
     'if node.locks or node is self.root: return'),
    ('a parent is not offered when its last child went', 'kv/prefix', 'self._offer(parent)', 'pass'),
    ('the tree shares the array of the caller', 'kv/prefix', 'np.array(o, dtype=np.int32) for o in (ids, pages)', 'np.asarray(o, dtype=np.int32) for o in (ids, pages)'),
    ('use does not count for the eviction order', 'kv/prefix', 'self._step += 1', 'pass'),
    ('a lock does not protect', 'kv/prefix', 'self._hold(handle.path, 1, handle.priority)', 'self._hold([], 1, handle.priority)'),
    ('an unlock is forgotten', 'kv/prefix', 'self._hold(handle.path, -1, handle.priority)', 'self._hold([], -1, handle.priority)'),
    ('what was found before it ran is not counted', 'kv/prefix', 'handle.path + way: node.hits += 1', 'way: node.hits += 1'),
    ('a user of importance makes no difference', 'kv/prefix', 'if priority > node.priority: node.priority = priority', 'pass'),
    ('the last user decides the importance', 'kv/prefix', 'if priority > node.priority: node.priority = priority', 'node.priority = priority'),
    ('a head keeps the tokens of its tail alive', 'kv/prefix', 'key=node.key[:n].copy()', 'key=node.key[:n]'),
    ('a head keeps the pages of its tail alive', 'kv/prefix', 'pages=node.pages[:n_pages].copy()', 'pages=node.pages[:n_pages]'),
    ('what was hidden waits for its old turn', 'kv/prefix', 'node.removed = True\n        self._offer(node)', 'node.removed = True'),
    ('nothing waits for a launched batch', 'kv/cache', 'ready = [items for step, items in self._waiting if step <= completed]',
     'ready = [items for step, items in self._waiting]'),
    ('what waits is lost', 'kv/cache', 'self._waiting = [o for o in self._waiting if o[0] > completed]', 'self._waiting = []'),
    ('all of the prompt is matched', 'kv/cache', 'pending.scores.matchable(pending.n_tokens) if', 'pending.n_tokens if'),
    ('pages are rounded down', 'kv/cache', 'return -(-n_tokens // self.page_size)', 'return n_tokens // self.page_size'),
    ('a row goes on pointing at a freed duplicate', 'kv/cache', 'self.table.write(np.full(len(copies), row), first + copies, theirs[copies])', 'pass'),
    ('a duplicate is free at once', 'kv/cache', 'self._release(own[copies], self._launched(pending))', 'self._release(own[copies], 0)'),
    ('pages of the ended are free at once', 'kv/cache', 'self._release(self._own_pages(pending), launched)', 'self._release(self._own_pages(pending), 0)'),
    ('locks of the ended are given up at once', 'kv/cache', 'self._unlocking.put([pending.handle], launched)',
     'self._unlocking.put([pending.handle], 0)'),
    ('tokens that the host does not know are inserted', 'kv/cache', 'n_tokens = min(self._cached_len(pending), known)', 'n_tokens = self._cached_len(pending)'),
    ('the last token is trusted', 'kv/cache', 'pending.n_tokens - 1)', 'pending.n_tokens)'),
    ('tokens that are not computed are inserted', 'kv/cache', 'n_tokens = min(self._cached_len(pending), known)', 'n_tokens = known'),
    ('sending somebody away brings nothing', 'kv/cache', 'return own + self.prefix.freed_by([o.handle for o in pendings])', 'return 0'),
    ('sending somebody away brings only his own', 'kv/cache', 'return own + self.prefix.freed_by([o.handle for o in pendings])', 'return own'),
    ('nobody looks at the tree', 'kv/cache', '    self.prefix.check()\n', '    pass\n'),
    ('what failed is cached', 'kv/cache', 'if keep: self._hand_over', 'if True: self._hand_over'),
    ('bad pages are found by others', 'kv/cache', 'self.prefix.remove(pending.handle)', 'pass'),
    ('keys of other namespaces are found', 'kv/cache', 'params.extra_key, params.priority)', 'None, params.priority)'),
    ('evicted pages are forgotten', 'kv/cache', 'self._push(evicted)', 'pass'),
    ('waiting pages do not count as available', 'kv/cache', 'return self.ready_size + self.releasing.size', 'return self.ready_size'),
    ('room is compared before the lock', 'scheduler/prefill', 'self.cache.lock(handle)\n    needed', 'needed'),
    ('a refused request keeps its lock', 'scheduler/prefill', 'self.cache.unlock(handle)\n        return False', 'return False'),
    ('pages are not reserved', 'scheduler/prefill', 'self.reserved_pages += self._pages_left(pending, start)', 'pass'),
    ('running requests have no reservation', 'scheduler/loop', 'self.prefill.schedule(self.decode.inflight_pages, other_tokens)', 'self.prefill.schedule(0, other_tokens)'),
    ('tokens are reserved, not pages', 'scheduler/decode', '-(-ends // self.page_size) - -(-lens // self.page_size)',
     '(ends - lens) // self.page_size'),
    ('the chunked one waits its turn', 'scheduler/prefill', 'if self.chunked: yield self.chunked', 'pass'),
    ('two requests are in pieces at once', 'scheduler/prefill', 'self.chunked = pending\n            break', 'self.chunked = pending'),
    ('a chunk is sampled', 'scheduler/prefill', 'sampled = end == pending.n_tokens < pending.max_len', 'sampled = pending.n_tokens < pending.max_len'),
    ('the row keeps the cached length of its last owner', 'scheduler/prefill', 'self.lengths.cached_len[row] = pending.handle.cached_len', 'pass'),
    ('stop tokens are not watched', 'scheduler/prefill', 'ends = pending.params.stop_token_ids, pending.text_stop, pending.grammar', 'ends = pending.grammar,'),
    ('grammars are not watched', 'scheduler/prefill', 'ends = pending.params.stop_token_ids, pending.text_stop, pending.grammar', 'ends = pending.params.stop_token_ids, pending.text_stop'),
    ('grammars are not told', 'scheduler/finish', 'complete = pending.grammar.accept(token) if pending.grammar else False', 'complete = False'),
    ('a mask comes a token late', 'scheduler/loop', '    if batch := self._schedule(): handed = self._launch(batch)\n    self._drain()\n    if batch and batch.step > self.completed:', '    mask = None\n    if batch := self._schedule(): handed, mask = self._launch(batch), self._mask(batch)\n    self._mask = lambda batch: mask\n    self._drain()\n    if batch and batch.step > self.completed:'),
    ('decode runs past the end', 'scheduler/decode', 'if stays.all(): return', 'return'),
    ('the rows are not made anew when one leaves', 'scheduler/decode', 'if self.running.pop(rid, None): self._rows = None', 'self.running.pop(rid, None)'),
    ('only one end token counts', 'scheduler/finish', 'token in eos_token_ids and', 'token == min(eos_token_ids, default=None) and'),
    ('length is asked one token late', 'scheduler/finish', 'if pending.n_tokens == pending.max_len', 'if pending.n_tokens == pending.max_len + 1'),
    ('nobody is watched', 'scheduler/finish', 'is_eos[tokens] | lengths.watched[rows] |', 'is_eos[tokens] |'),
    ('a page is taken that is there already', 'scheduler/prepare', 'self.first_pages = cache.pages_for(self.cached_lens)',
     'self.first_pages = self.cached_lens // cache.page_size'),
    ('a batch shows the lengths of later steps', 'scheduler/prepare', 'self.cached_lens, self.device_lens = lengths.cached_len[rows], lengths.device_len[rows]',
     'self.cached_lens, self.device_lens = lengths.cached_len[rows], lengths.device_len[:len(reqs)]'),
    ('pages that only wait are taken', 'scheduler/loop', 'if plan.new_pages > self.cache.ready_size:', 'if False:'),
    ('a late token is told', 'scheduler/finish', 'if pending.finish_reason: return\n    if not finite', 'if not finite'),
    ('an abort in flight is forgotten', 'scheduler/finish', 'if pending.doom: return self.end(pending, *pending.doom)', 'pass'),
    ('rows are free at once', 'scheduler/finish', 'self._rows_waiting.put([row], int(self.table.lengths.launched[row]))', 'self._rows_waiting.put([row], 0)'),
    ('rows are never free', 'scheduler/finish', 'self.table.free(row)', 'pass'),
    ('a prompt is given to the tree twice', 'scheduler/finish', 'self._computed, self._ended = [], []', 'self._ended = []'),
    ('nothing is given to the tree before the end', 'scheduler/loop', 'self._computed = [o.pending for o in batch.reqs if o.rid not in running]', 'pass'),
    ('what failed stays in the tree', 'scheduler/finish', 'self.cache.flush()', 'pass'),
    ('after a failure batches are still in flight', 'scheduler/loop', 'self.completed = self._suspect = self.launched ', 'self._suspect = self.launched '),
    ('the batch after a failed one is awaited', 'scheduler/loop', 'if batch and batch.step > self.completed:', 'if batch:'),
    ('a name is used twice', 'scheduler/finish', 'if rid in self.alive:', 'if False:'),
    ('a request that can never fit is let in', 'scheduler/prefill', 'longest = min(self.max_seq_len, self.slots + 1)', 'longest = min(self.max_seq_len, self.slots + 99)'),
    ('who was misled is told its tokens', 'scheduler/finish', 'if pending in self._misled: return\n    if not finite:', 'if not finite:'),
    ('who was misled begins anew in flight', 'scheduler/finish', 'home = [o for o in still if lengths.launched[o.table_idx] <= self.completed]', 'home = still'),
    ('who fails by what it found is told so', 'scheduler/finish', '    self._mislead(pending)\n    pending.trusting = False', '    pending.trusting = False'),
    ('what is exchanged for another\'s does not count as borrowed', 'kv/prefix', 'if n: handle.borrowed = True', 'pass'),
    ('what is found does not count as borrowed', 'kv/prefix', 'priority, borrowed=n > 0)', 'priority)'),
    ('who begins anew by itself finds the same', 'kv/cache', 'pending.scores.matchable(pending.n_tokens) if pending.trusting else 0', 'pending.scores.matchable(pending.n_tokens)'),
    ('who begins anew by itself shares', 'scheduler/finish', 'keep=pending.trusting and not pending.bad', 'keep=not pending.bad'),
    ('a retracted request goes to the end of the line', 'scheduler/finish', 'self.prefill.put_back(pending, at_head)', 'self.prefill.put_back(pending, False)'),
    ('a retracted request keeps its row', 'scheduler/finish', 'self._give_back(pending)\n    self._collect()\n    self.prefill', 'self.prefill'),
    ('who makes way rides all the same', 'scheduler/loop', 'reqs = [] if too_long or self._suspect else self._prompts(n_running * mixed)\n    running = self.decode.schedule() ', 'running = self.decode.schedule()\n    reqs = [] if too_long or self._suspect else self._prompts(n_running * mixed) '),
    ('nobody is sent back', 'scheduler/loop', 'if plan.new_pages <= self.cache.ready_size: return plan', 'return plan'),
    ('the last one is sent back too', 'scheduler/loop', 'if len(victims) > 1 or mode is not ForwardMode.DECODE: self.retract(victims[0])', 'if True: self.retract(victims[0])'),
    ('the optimist never learns', 'scheduler/decode', 'seen = (made.sum() + 20 * len(made)) / (longest.sum() + 1)', 'seen = 0'),
    ('the clip is forgotten', 'scheduler/decode', 'np.ceil(np.minimum(left, self.clip) * self.ratio)', 'np.ceil(left * self.ratio)'),
    ('most tokens made go first', 'scheduler/decode', 'return sorted(order, key=lambda o: len(o.output_ids))', 'return sorted(order, key=lambda o: -len(o.output_ids))'),
    ('a pause does not hold', 'scheduler/loop', 'if self.paused: return None', 'pass'),
    ('the streak is not bounded', 'scheduler/loop', 'reqs = [] if too_long or self._suspect', 'reqs = [] if self._suspect'),
    ('everyone makes way', 'scheduler/loop', 'if o.params.priority < limit', 'if True'),
    ('time never runs out', 'scheduler/finish', 'while self._line and self._line[0][0] <= now:', 'while False:'),
    ('an abort ends at once', 'scheduler/finish', 'in_flight = row is not None and lengths.launched[row] > self.completed', 'in_flight = False'),
    ('an aborted request is launched again', 'scheduler/finish', 'pending.doom = pending.doom or (reason, error)\n    self.prefill.remove(pending)\n    self.decode.remove_req(pending.rid)', 'pending.doom = pending.doom or (reason, error)\n    self.prefill.remove(pending)'),
    ('an aborted prompt goes on', 'scheduler/finish', 'pending.doom = pending.doom or (reason, error)\n    self.prefill.remove(pending)', 'pending.doom = pending.doom or (reason, error)'),
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
    env = {**os.environ, 'TST_PACKAGE': '1', 'TST_LIVES': '150', 'TST_SHRINK': '0', 'OMP_NUM_THREADS': '1', 'PYTHONDONTWRITEBYTECODE': '1'}
    number = int(chapters[module].split('_')[0])
    above = [o for o in chapters.values() if int(o.split('_')[0]) > number]
    tries = [['tests/test_notebooks.py', '-k', chapters[module]], ['tests/test_radix.py', 'tests/test_scheduler.py', '-k', 'not every'],
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
