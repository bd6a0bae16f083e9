"""``python -m shardtensor`` prints the op table: every op that has a rule, and where the rule lives."""

import shardtensor.rules  # noqa: F401  (fills the table)
from shardtensor.registry import table

if __name__ == "__main__":
    print(table())
