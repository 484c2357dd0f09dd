"""Chat templates in the manner of well-known families, and messages to render with them."""

CHATML_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe helpful.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% if loop.first %}<|bos|>{% endif %}"
    "<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
GEMMA = (
    "<|bos|>{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|turn|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|/turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>model\n{% endif %}"
)
MISTRAL = (
    "<|bos|>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}<|eot|>{% endif %}{% endfor %}"
)
PARTS_ONLY = (  # in the manner of SmolVLM: text is shown where it is a part of a message
    "{% for m in messages %}{{ m.role | capitalize }}{% if m.content[0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for part in m.content %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
THINK = (  # in the manner of Qwen3: an empty thinking block in the last turn only, thoughts of earlier turns removed
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set text = m.content.split('</think>')[-1].lstrip('\n') %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n"
    "{{ m.content.split('</think>')[0].split('<think>')[-1].strip('\n') if '</think>' in m.content else '' }}"
    "\n</think>\n\n{{ text }}{% else %}{{ text }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_WHOLE = MARKED.replace("{% endgeneration %}<|im_end|>\n", "<|im_end|>{% endgeneration %}\n")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GATHERED = (  # the text is made first and shown at the end, so no loop tells where a message is
    "{% set ns = namespace(text='') %}{% for m in messages %}"
    "{% set ns.text = ns.text ~ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' %}{% endfor %}{{ ns.text }}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MACRO = (
    "{% macro turn(m) %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endmacro %}"
    "{% for m in messages %}{{ turn(m) }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INDEXED = CHATML.replace("for m in messages %}", "for i in range(messages | length) %}{% set m = messages[i] %}")
LAST_END = CHATML.replace("<|im_end|>\n", "{% if loop.last %}<|eot|>{% else %}<|im_end|>\n{% endif %}", 1)
NUMBERED = "{% for m in messages %}{{ messages | length }} {{ m.role }} {{ m.content }}<|im_end|>\n{% endfor %}"


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}
