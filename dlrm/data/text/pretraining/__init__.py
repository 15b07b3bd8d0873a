"""The former path of `dlrm.language.pretraining`; the next version removes it."""
