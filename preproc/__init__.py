"""Preprocessing of raw click logs; runs where torch is not, and `dlrm` never imports it."""
