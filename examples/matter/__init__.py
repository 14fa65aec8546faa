"""Parts of `does_it_matter.py`: the policy, a small GPT, and the report of its runs."""
