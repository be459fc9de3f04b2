"""Chat templates of the kinds that targets ship, for the tiny tokenizer."""

from __future__ import annotations

import copy

from draftsmith.data.template import ChatTemplate

END = "<|im_end|>"
HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

DEFAULT_SYSTEM = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}" + HEADER
)
STRIPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1].lstrip() }}{% else %}{{ m['content'] }}{% endif %}"
    "<|im_end|>\n{% endfor %}" + HEADER
)
REFUSES_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}" + HEADER
)
REWRITES_ANSWER = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
NO_END = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
OTHER_END = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}" + HEADER
)
TRIMS = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}" + HEADER
BEGINS = (
    "<|endoftext|>{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN_WORDS = (
    "{% for m in messages %}### {{ m['role'] }}:\n{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)
HISTORY_END = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ eos_token }}{% else %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SWITCHES_THINKING = (  # like Qwen3: thinking of the last answer alone, an empty block where there is none, and one in the prompt when switched off
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% set c = m['content'] %}{% set r = m['reasoning_content'] | default('') %}"
    "{% if '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1] %}{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n{{ r.strip('\n') }}\n</think>\n\n{% endif %}{{ c }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
FORCES_THINKING = (  # like DeepSeek-R1: the prompt begins the thinking, the rendered answer lacks it
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'].split('</think>')[-1].lstrip() }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}{% endgeneration %}<|im_end|>\n{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}" + HEADER
)
MARKED_IN_PART = MARKED.replace(
    "{% generation %}{{ m['content'] }}{% endgeneration %}",
    "{{ m['content'].split('|')[0] }}{% generation %}{{ m['content'].split('|')[-1] }}{% endgeneration %}",
)
MARKED_WITH_HEADER = MARKED.replace("<|im_start|>{{ m['role'] }}\n{% if", "{% if").replace(
    "{% generation %}", "{% generation %}<|im_start|>assistant\n"
).replace("{% else %}", "{% else %}<|im_start|>{{ m['role'] }}\n")  # fmt: skip
TEXT_ARGUMENTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}<call>{{ call['function']['name'] + ' ' + call['function']['arguments'] }}{% endfor %}<|im_end|>\n{% endfor %}"
    + HEADER
)
OBJECT_ARGUMENTS = TEXT_ARGUMENTS.replace(
    " + call['function']['arguments'] }}", " }}{% for k, v in call['function']['arguments'].items() %}{{ k }}={{ v }}{% endfor %}"
)
MERGES = (  # answers in a row become one turn
    "{% set ns = namespace(role='') %}{% for m in messages %}{% if m['role'] != ns.role %}{% if not loop.first %}<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{% else %}\n{% endif %}{% set ns.role = m['role'] %}{{ m['content'] }}{% endfor %}<|im_end|>\n" + HEADER
)


def changed(template: ChatTemplate, jinja: str, eos: str | None = None) -> ChatTemplate:
    """The same tokenizer under another template, perhaps with another end-of-sequence token."""
    tokenizer = copy.deepcopy(template.tokenizer)
    tokenizer.chat_template = jinja
    if eos is not None:
        tokenizer.eos_token = eos
    return ChatTemplate(tokenizer, "changed")
