"""What `nbs/experiments/replicas.json` holds: every rule on every kind of traffic, in runs of 40,000 requests
with a seed each, and replicas that sleep.

    python tests/replicas.py nbs/experiments/replicas.json 5    # five seeds, 200,000 requests a rule: hours
A run is a process of its own; what is there already is not run again."""
import json, subprocess, sys
from operator import itemgetter
from pathlib import Path

from script import load

RoutedStats, routing_rules, traffic = itemgetter('RoutedStats', 'routing_rules',
    'traffic')(load('tools/routing'))
Results = dict[str, dict[str, dict]]   # by kind and rule: which seeds, and the sum of their counts


def add(results: Results, line: str) -> None:
    "Add what a run has printed"
    kind, rule, seed, counts = json.loads(line)
    here = results.setdefault(kind, {}).setdefault(rule, {'seeds': [], 'counts': None})
    stats = RoutedStats.from_json(counts)
    if here['counts']: stats += RoutedStats.from_json(here['counts'])
    here['seeds'].append(seed)
    here['counts'] = stats.to_json()


def main(out: str, n_seeds: str) -> None:
    "Run what is missing, and write after each"
    path = Path(out)
    stored = json.loads(path.read_text()) if path.exists() else {}
    results: Results = stored.setdefault('rules', {})
    def write() -> None: path.write_text(json.dumps(stored) + '\n')
    if 'sleeping' not in stored:
        sleeping = load('tools/sleeping_replicas')
        cost = sleeping['calibrate']()
        stored['sleeping'] = {name: sleeping['compare'](cost, rate)
                              for name, rate in sleeping['loads'].items()}
        write()
    for seed in range(int(n_seeds)):
        for kind in traffic:
            for rule in (*routing_rules, 'one cache'):
                if seed in results.get(kind, {}).get(rule, {'seeds': []})['seeds']: continue
                run = [sys.executable, str(Path(__file__).with_name('script.py')), 'tools/routing', 'main',
                       kind, rule, '40000', str(seed)]
                done = subprocess.run(run, stdout=subprocess.PIPE, text=True, check=True)
                add(results, done.stdout.splitlines()[-1])
                write()


if __name__ == '__main__': main(*sys.argv[1:])
