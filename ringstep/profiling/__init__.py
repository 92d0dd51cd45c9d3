"""Jobs on real phones through Qualcomm AI Hub, and what can be reasoned from their profiles."""
