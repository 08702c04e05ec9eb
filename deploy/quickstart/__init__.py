"""The embedded quick start: real facts, honest splits, a tiny policy and its demonstrations, made on the spot.

`python -m deploy.quickstart --out DIR [--seed N]` writes `corpus.jsonl`, `train.jsonl`, `eval.jsonl`, `warmstart.jsonl`
and `model/` into DIR; a second call with the same settings returns at once. Read `facts`, `passages`, `questions`,
`demonstrations`, `policy`, `build`, in this order.

Splits. Entities go 60/25/15 to warm start, training and held-out, a country together with all its subdivisions. A
held-out entity is in no demonstration and in no training question; its passage is in the corpus, as every entity's is.
One question in eight, in training as in evaluation, needs two searches ("... of the country of the subdivision X").
Only entities that are the only one of their kind with their name are asked about.

The search loop's text, which demonstrations show and the `search` environment follows:

    prompt       What is the alpha-3 code of the country Belarus?
    model        <search> country Belarus</search>
    environment  <information> Belarus: country; alpha-2 BY; alpha-3 BLR; numeric 112.</information>
    model        <answer> BLR</answer>

The prompt is a raw string. A model turn ends with its closing tag (kept), with the end-of-text token or at its length
limit. A search is answered by the passages that the retriever found, each rendered as ` Title: text`, one to a line.
A turn that neither searches nor answers gets ` That was neither a search nor an answer.` between the information tags.
The reward is exact match of the response's last answer. The pieces follow each other directly and each is tokenised
alone: so the tokens of a demonstration are the tokens that the policy writes and reads.

Segments of a demonstration carry loss weights: prompt 0, policy 1, observation 0.3.
"""
