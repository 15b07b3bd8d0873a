"""Raw click logs whose best reachable AUC is known: dlrm simulate --output DIR"""
