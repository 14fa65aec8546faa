import re
p='tests/megatron/test_begin_step.py'; s=open(p).read()
s=s.replace('''        totals = None if changes.get("step_tokens") == "no totals" else StepTotals(**{**KNOWN, **changes})
''','''
        def totals_of(batches: list[Any], changes: Any = changes) -> Any:
            return None if changes.get("step_tokens") == "no totals" else StepTotals(**{**KNOWN, **changes})

''').replace("totals_of=lambda batches, totals=totals: totals, **options","totals_of=totals_of, **options")
i=s.index("# ---- groups, `attached` and the first line"); j=s.index("def test_ranks_report_their_errors")
sec=s[i:j].split("\n",3)[3]
head=s[:s.index("# ---- the look-ahead")]
s=s[:i]+s[j:]
s=s.replace('"""How a step begins: the look-ahead, its collectives, totals that a user knows, process groups, and the first line."""','"""How a step begins: the look-ahead, its collectives, errors on every rank, and totals that a user knows."""')
open(p,'w').write(s)
head=head.replace('"""How a step begins: the look-ahead, its collectives, totals that a user knows, process groups, and the first line."""','"""A launch: which process groups it takes, what `attached` replaces in Megatron, and the first step\'s line."""')
open('tests/megatron/test_launch.py','w').write(head+sec.rstrip()+"\n")
p='tests/megatron/test_handover.py'; s=open(p).read()
s=s.rstrip()+'''


def outcome_of_two_taken() -> str:
    start()
    return outcome_of(table_model(TABLE), RIGHT["loss"], takes=2)


def test_a_forward_step_takes_one_micro_batch() -> None:
    assert "forward_step took 2 micro-batches from its iterator" in run_ranks(1, outcome_of_two_taken)[0]
'''
s=s.replace('''            num_microbatches=2 if takes == 1 else 1,
''','''            num_microbatches=2,
''')
open(p,'w').write(s)
# aggregation: the edges
p='tests/megatron/test_aggregation.py'; s=open(p).read()
print(s[:5200])
