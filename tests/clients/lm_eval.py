# needs: lm_eval[api,hf]
"""lm_eval on a task made here: over HTTP, with the server's own tokenizer, as `hf` on the same checkpoint."""
import json, logging, os, sys, tempfile
from pathlib import Path

os.environ |= dict(HF_HUB_OFFLINE='1', HF_DATASETS_OFFLINE='1', TOKENIZERS_PARALLELISM='false',
                   OPENAI_API_KEY='x', HF_HOME=tempfile.mkdtemp(), TQDM_DISABLE='1')
import lm_eval

logging.disable(logging.WARNING)
url, model = sys.argv[1:3]
checkpoint = Path(__file__).resolve().parents[2]/'minisgl_lit/formats/embedded_data/checkpoint'

# ---- the task: which word goes on best, and what comes next
data = Path(tempfile.mkdtemp())/'rows.jsonl'
rows = [dict(text=f'The {a} of a', words=[' request', ' page', ' tree of pages'], right=i % 3)
        for i, a in enumerate('page lock tree row token cache batch step'.split())]
data.write_text('\n'.join(map(json.dumps, rows)))
common = dict(dataset_path='json', dataset_kwargs=dict(data_files=dict(test=str(data))), test_split='test',
              doc_to_text='{{text}}', num_fewshot=0)
choices = (common | dict(task='choices', output_type='multiple_choice', doc_to_choice='{{words}}',
                         doc_to_target='right', metric_list=[dict(metric='acc')]))
answers = (common | dict(task='answers', output_type='generate_until', doc_to_target='{{words[0]}}',
    generation_kwargs=dict(until=['\n', '.'], max_gen_toks=24, temperature=0, do_sample=False),
                        metric_list=[dict(metric='exact_match')]))

def run(kind, args, tasks, **more):
    "The samples of each task, in order"
    said = lm_eval.simple_evaluate(model=kind, model_args=args, tasks=tasks, batch_size=1, log_samples=True,
                                   bootstrap_iters=0, verbosity='ERROR', **more)
    return {name: [o['resps'] for o in sorted(said['samples'][name], key=lambda o: o['doc_id'])]
            for name in said['samples']}

ours = (run('local-completions',
           f'base_url={url}/v1/completions,model={model},tokenizer_backend=remote,'
            'num_concurrent=4,max_length=512', [choices, answers]))
theirs = run('hf', f'pretrained={checkpoint},dtype=float32,max_length=512', [choices, answers], device='cpu')
worst = 0.
for mine, right in zip(ours['choices'], theirs['choices']):
    for [[a, greedy]], [[b, is_greedy]] in zip(mine, right):
        worst = max(worst, abs(float(a) - float(b)))
        assert str(greedy) == str(is_greedy), (mine, right)
assert worst < 1e-3, worst
assert ours['answers'] == theirs['answers'], (ours['answers'], theirs['answers'])

# ---- conversations: lm_eval knows no logprobs of them
chat = run('local-chat-completions', f'base_url={url}/v1/chat/completions,model={model},num_concurrent=4',
           [answers], apply_chat_template=True)
hf_chat = run('hf', f'pretrained={checkpoint},dtype=float32,max_length=512', [answers], device='cpu',
              apply_chat_template=True)
assert chat['answers'] == hf_chat['answers'], (chat['answers'], hf_chat['answers'])
print('ok', f'{len(rows)*3} logprobs differ by at most {worst:.1e} nats')
