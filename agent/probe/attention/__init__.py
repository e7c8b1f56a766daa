"""Measures attention logits and output logits during the forward pass of sampled steps.

`calls` stands in for functions of `torch.nn.functional` during one forward pass, `sampling`
collects a row of each of their calls, which `attention_logits` and `output_logits` compute; `step`
adds them to the step under way.
"""
