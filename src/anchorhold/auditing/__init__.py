"""How robust is this model, and can the answer be trusted?

intake    what is audited: data in every form becomes queries and a gallery
sweep     one attack on all of them, in fixed batches; `shards` keeps what is done
verdict   what came out: columns, scores, intervals, flags, and how it is written
run       audit(): all of it together; `until` repeats it until it is sure enough
ensemble  the attacks of the strong audit; `strong` runs them, `realisable` asks what files keep of them
receipts  images of a strong audit, as files; `verifying` asks whether they hold
algorithm1  003's table over methods and models
single    one image, and its list before and after
"""

from .plan import AuditSettings
from .run import Evidence, audit, flags_of
from .single import attack_one
from .verdict import Audit

__all__ = ["Audit", "AuditSettings", "Evidence", "attack_one", "audit", "flags_of"]
