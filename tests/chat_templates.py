"""Chat templates in the manner of well-known models, written for the tests, and conversations to try them on."""

CHATML_WITH_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query=0) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}
        {%- set ns.last_query = messages | length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content and loop.index0 < ns.last_query %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}{% generation %}{{ content }}
        {%- for call in message.tool_calls %}
            {%- set function = call.function %}
            {{- '\\n<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}{% endgeneration %}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

HEADERS_WITH_DATE = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) + "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

STRICT_TURNS = """\
{{ bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported, not ' ~ message['role']) }}
    {%- endif %}
{%- endfor %}
"""

PARTS_ONLY = """\
{% for message in messages %}
<|{{ message.role }}|>
{% for part in message.content if part.type == 'text' %}
{{ part.text }}{% endfor %}

{% endfor %}
"""

TEMPLATES = {"chatml": CHATML_WITH_TOOLS, "headers": HEADERS_WITH_DATE, "strict": STRICT_TURNS}

HOSTILE = {
    "endless loops": "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "a long repetition": "{{ 'x' * 10 ** 12 }}",
    "a huge power": "{{ (messages | length + 9) ** (10 ** 10) }}",
    "a wide format": "{{ '%0999999999d' % 1 }}",
    "a wide column": "{{ 'x'.center(2 ** 36) }}",
    "doubling": "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "much output": "{% for i in range(99999) %}{% for j in range(999) %}xxxxxxxxxx{% endfor %}{% endfor %}",
    "endless recursion": "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}",
    "internals": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a hidden name": "{{ namespace(__class__=1) }}",
    "changing the messages": "{{ messages.append(1) }}",
}
"""Programs that must end in an error, soon."""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "größe",
            "description": "Adds <b>two</b> & more",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]
SIMPLE = [{"role": "user", "content": "  2+2? "}]
TURNS = [
    {"role": "user", "content": "Hi 'there' \"ü\" <b>\n\n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello! "},
    {"role": "user", "content": "你好 {{ 1 }}"},
]
WITH_SYSTEM = [{"role": "system", "content": " Be brief. "}, *TURNS]
WITH_CALL = [
    {"role": "user", "content": "add"},
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1, "b": "é"}}}]},
    {"role": "tool", "content": "1"},
    {"role": "assistant", "content": "It is 1."},
    {"role": "user", "content": "thanks"},
]
CONVERSATIONS = {"simple": SIMPLE, "turns": TURNS, "system": WITH_SYSTEM, "call": WITH_CALL}
