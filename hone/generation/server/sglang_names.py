"""Names that SGLang's backend and its scheduler process share."""

SAMPLED_FROM = "hone_sampling_log_probs"
"""Key of custom info with log-probs under the distribution sampled from, after temperature and truncation."""
