#!/usr/bin/env python3
"""Reference renderings of chat templates by transformers (jinja2), for the tests of `chat`.

  make_chat.py OUT.json

templates: name to source, written in the style of the families named.
cases: {template, messages, options, text} or, where the template refuses, {..., error}; error is
  null where jinja2 fails by itself. options are add_generation_prompt, bos_token, eos_token,
  tools, and the extra variables under `extra`. The time is always MOMENT.
snippets: {source, text}, each run with the variables VARS; text is null where jinja2 fails."""

import datetime
import json
import sys

import jinja2
import transformers
from transformers.utils import chat_template_utils as utils

MOMENT = [2024, 7, 4, 9, 5, 3]

CHATML = """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are helpful<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

# Tools in XML tags, results of tools grouped into one user turn.
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are helpful.' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n<tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <json>}\\n</tool_call><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# Dates, tools in the first user turn, indented JSON.
LLAMA = """\
{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}

{#- The system message comes out first. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}

{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {{- "You have functions. Respond with JSON.\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}

{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("Cannot put tools in the first user message when there's no first user message!") }}
    {%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
    {{- "Functions:\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}

{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {%- for arg_name, arg_val in tool_call.arguments | items %}
            {{- "|" ~ arg_name ~ '="' ~ arg_val ~ '"' }}
            {%- if not loop.last %}
                {{- ", " }}
            {%- endif %}
        {%- endfor %}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# Alternation is checked; the system message goes before the last user message.
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}

{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial optional system message!") }}
    {%- endif %}
{%- endfor %}
{{- user_messages|length }}"""

# Roles renamed, content as parts, text outside of tags.
GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '

' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '

' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '
' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model
'}}
{%- endif -%}
"""

DEEPSEEK = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}\
{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='', is_first_sp=true) %}\
{%- for message in messages %}{%- if message['role'] == 'system' %}{%- if ns.is_first_sp %}\
{% set ns.system_prompt = ns.system_prompt + message['content'] %}{% set ns.is_first_sp = false %}{%- else %}\
{% set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}{%- endif %}{%- endif %}{%- endfor %}\
{{ bos_token }}{{ ns.system_prompt }}{%- for message in messages %}{%- if message['role'] == 'user' %}\
{%- set ns.is_tool = false -%}{{'<｜User｜>' + message['content']}}{%- endif %}\
{%- if message['role'] == 'assistant' and 'tool_calls' in message %}{%- set ns.is_tool = false -%}\
{%- for tool in message['tool_calls'] %}{%- if not ns.is_first %}{%- if message['content'] is none %}\
{{'<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json' + '\\n' + tool['function']['arguments']|tojson + '\\n' + '```' + '<｜tool▁call▁end｜>'}}\
{%- else %}{{'<｜Assistant｜>' + message['content'] + '<｜tool▁calls▁begin｜>' + tool['type']}}{%- endif %}\
{%- set ns.is_first = true -%}{%- else %}{{'\\n' + '<｜tool▁call▁begin｜>' + tool['function']['name']}}{%- endif %}{%- endfor %}\
{{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}{%- endif %}\
{%- if message['role'] == 'assistant' and 'tool_calls' not in message %}{% set content = message['content'] %}\
{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}\
{{'<｜Assistant｜>' + content + eos_token}}{%- endif %}\
{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}{%- if ns.is_output_first %}\
{{'<｜tool▁outputs▁begin｜>' + message['content']}}{%- set ns.is_output_first = false %}{%- else %}{{'\\n' + message['content']}}{%- endif %}{%- endif %}\
{%- endfor -%}{% if ns.is_tool %}{{'<｜tool▁outputs▁end｜>'}}{% endif %}\
{% if add_generation_prompt and not ns.is_tool %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"""

# Macros, recursion over schemas, generation blocks, plain text and indented tags.
TYPED = """\
{%- macro kind(schema, depth=0) -%}
    {%- if schema.type == "array" -%}
        {%- if schema['items'] -%}{{ kind(schema['items'], depth + 1) }}[]{%- else -%}any[]{%- endif -%}
    {%- elif schema.type == "object" and schema.properties -%}
        {{- "{" }}
        {%- for name, part in schema.properties.items() -%}
            {{- name }}{{ "?" if name not in (schema.required or []) }}: {{ kind(part, depth=depth + 1) }}
            {%- if not loop.last %}; {% endif -%}
        {%- endfor -%}
        {{- "}" }}
    {%- elif schema.enum is defined -%}
        {{- '"' + schema.enum | join('" | "') + '"' }}
    {%- else -%}
        {{- schema.type | default("any") | upper }}{{ depth }}
    {%- endif -%}
{%- endmacro -%}
Header
  {% if tools %}
    {% for tool in tools %}
type {{ tool.function.name }} = {{ kind(tool.function.parameters) }}
    {% endfor %}
  {% endif %}
{# a comment
   of two lines #}
{% for message in messages %}
    {% if message.role == "system" %}{% continue %}{% endif %}
    {% if message.role == "assistant" %}
<a>{% generation %}{{ message.content }}{% endgeneration %}</a>
    {% else %}
{{ message.role|title }}: {{ message.content }} ({{ loop.index }}/{{ loop.length }}, after {{ loop.previtem.role if loop.previtem is defined else "nothing" }})
    {% endif %}
    {% if loop.index >= 4 %}{% break %}{% endif %}
{% else %}
nothing said
{% endfor %}
{%+ if add_generation_prompt +%}
  <a>
{% endif %}
"""

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather \"now\" in a place, in °C <b>",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "City & country"},
                "days": {"type": "array", "items": {"type": "integer"}},
                "unit": {"enum": ["C", "F"]},
                "more": {"type": "object", "properties": {"x": {"type": "number", "default": 1.5}}},
            },
            "required": ["place"],
        },
    },
}

SYSTEM = {"role": "system", "content": " Be brief. "}
HELLO = {"role": "user", "content": "Hello, Wörld! <|x|> \n"}
REPLY = {"role": "assistant", "content": " Hi 'there' \"you\".\n"}
AGAIN = {"role": "user", "content": "And\nagain?"}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"type": "function", "function": {"name": "get_weather", "arguments": {"place": "Zürich", "days": [1, 2]}}}
    ],
}
RESULT = {"role": "tool", "content": "{\"t\": 21}"}
PARTS = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": " What is this? "}]}

TALKS = {
    "one": [HELLO],
    "system": [SYSTEM, HELLO],
    "three": [HELLO, REPLY, AGAIN],
    "four": [SYSTEM, HELLO, REPLY, AGAIN],
    "thought": [HELLO, THOUGHT, AGAIN, THOUGHT],
    "call": [HELLO, CALL, RESULT],
    "calls": [SYSTEM, HELLO, CALL, RESULT, RESULT, REPLY, AGAIN],
    "parts": [PARTS],
    "twice": [HELLO, AGAIN],
    "wrong": [HELLO, {"role": "critic", "content": "no"}],
    "system_only": [SYSTEM],
    "none": [],
}

OPTIONS = [
    {"add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>", "tools": None, "extra": {}},
    {"add_generation_prompt": False, "bos_token": "<s>", "eos_token": "</s>", "tools": [TOOL], "extra": {}},
    {
        "add_generation_prompt": True,
        "bos_token": "",
        "eos_token": "</s>",
        "tools": [TOOL],
        "extra": {"enable_thinking": False, "tools_in_user_message": False, "date_string": "1 May 2025"},
    },
]

TEMPLATES = {
    "chatml": CHATML,
    "qwen": QWEN,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "deepseek": DEEPSEEK,
    "typed": TYPED,
}

VARS = {
    "s": "Hello World",
    "u": "  äß x  ",
    "n": 7,
    "f": 2.5,
    "t": True,
    "no": None,
    "e": "",
    "l": [3, 1, 2],
    "d": {"b": 1, "a": [1, {"x": None}], "items": "i"},
    "m": [{"role": "user", "n": 2}, {"role": "tool", "n": 1}, {"role": "user", "n": 3}],
}

SNIPPETS = """\
{{ s[0] }}{{ s[-1] }}{{ s[1:4] }}{{ s[::-1] }}{{ s[::2] }}{{ s[5:2:-1] }}{{ s[100:] }}{{ s[-3:] }}{{ s[:-3] }}
{{ l[::-1] }}{{ l[1:] }}{{ l[:-1] }}{{ l[0:2:-1] }}{{ l[-100:100] }}{{ l[5] }}{{ l[-1] }}{{ l[100::-2] }}
{{ d }}{{ no }}{{ t }}{{ f }}{{ n }}{{ [s, no, t] }}{{ {'a': 'it\\'s "q"'} }}
{{ d.b }}{{ d['b'] }}{{ d.get('b') }}{{ d.get('z') }}{{ d.get('z', 5) }}{{ d.z }}|{{ d['z'] }}
{{ d['items'] }}{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}{{ d.items is defined }}{{ d.keys()|list }}
{{ missing }}|{{ missing is defined }}|{{ not missing }}|{{ missing == missing2 }}|{{ missing ~ 'x' }}
{{ missing.x }}
{{ missing + 'x' }}
{{ missing['x'] }}
{{ d.z.y }}
{{ s + 1 }}
{{ s ~ 1 ~ t ~ no ~ f ~ l }}
{{ n + 1 }} {{ n - 8 }} {{ n * 2 }} {{ n / 2 }} {{ n // 2 }} {{ -n // 2 }} {{ n % 3 }} {{ -n % 3 }} {{ n ** 2 }} {{ 2 ** -1 }}
{{ n / 0 }}
{{ 1 + 2 * 3 ~ 4 + 5 }}
{{ -n|abs }} {{ -2.5|abs }} {{ (-n)|abs }}
{{ s.strip('Hd') }}{{ u.strip() }}|{{ u.lstrip() }}|{{ u.rstrip() }}|{{ u.upper() }}|{{ s.lower() }}|{{ 'a-b c\\'d'.title() }}|{{ 'a-b c\\'d'|title }}|{{ 'hELLO wORLD'.capitalize() }}
{{ 'a,b,,c'.split(',') }}{{ ' a  b '.split() }}{{ 'a,b,c'.split(',', 1) }}{{ 'a,b,c'.rsplit(',', 1) }}{{ 'a b c'.split(None, 1) }}{{ 'abc'.split('x')[-1] }}
{{ 'a\\nb\\r\\nc\\n'.splitlines() }}{{ 'aXbXc'.partition('X') | list }}{{ 'aXbXc'.replace('X', '-', 1) }}{{ 'abc'.replace('', '.') }}
{{ s.startswith('He') }}{{ s.endswith(('x', 'ld')) }}{{ s.find('World') }}{{ s.find('z') }}{{ s.rfind('o') }}{{ s.count('o') }}{{ 'äöü'.find('ü') }}
{{ ', '.join(['a', 'b']) }}{{ l|join('-') }}{{ m|join(',', attribute='role') }}{{ '{} {x} {{}}'.format(1, x=2) }}{{ '%s-%d%%' % (s, n) }}{{ '%s' % s }}
{{ '12'.isdigit() }}{{ ''.isdigit() }}{{ 'aB'.isalpha() }}{{ 'ab'.islower() }}{{ 'A1'.isupper() }}{{ ' '.isspace() }}{{ 'abc'.removeprefix('a') }}{{ 'abc'.removesuffix('c') }}
{{ s|length }}{{ l|length }}{{ d|length }}{{ e|length }}{{ s|first }}{{ l|last }}{{ l|first }}{{ []|first }}
{{ l|sort }}{{ l|sort(reverse=true) }}{{ ['b', 'A', 'c']|sort }}{{ m|sort(attribute='n')|map(attribute='n')|list }}{{ d|dictsort|map('first')|list }}
{{ m|selectattr('role', 'equalto', 'user')|list|length }}{{ m|rejectattr('role', 'eq', 'user')|map(attribute='n')|list }}{{ l|select('odd')|list }}{{ l|reject('gt', 1)|list }}{{ m|selectattr('n')|list|length }}
{{ l|map('string')|join('+') }}{{ ['a','b']|map('upper')|list }}{{ l|sum }}{{ l|min }}{{ l|max }}{{ [1,1,2]|unique|list }}{{ l|reverse|list }}{{ s|reverse }}
{{ '3'|int + 1 }}{{ 'x'|int }}{{ 'x'|int(9) }}{{ '2.7'|int }}{{ 2.7|int }}{{ '1.5'|float }}{{ 7|float }}{{ 2.567|round(2) }}{{ 2.5|round }}{{ n|string + 'x' }}
{{ missing|default('d') }}{{ e|default('d') }}{{ e|default('d', true) }}{{ no|default('d') }}{{ no|d('x', boolean=true) }}
{{ 'a\\nb\\n\\nc'|indent }}|{{ 'a\\nb'|indent(2, true) }}|{{ 'a\\n\\nb'|indent(width=1, blank=true) }}|{{ '<a>'|e }}|{{ '<a>'|safe }}|{{ ' x '|trim }}|{{ 'xax'|trim('x') }}|{{ 'a b'|wordcount }}
{{ d|tojson }}{{ l|tojson(indent=2) }}{{ 'ä"\\n<'|tojson }}{{ 'ä😀'|tojson(ensure_ascii=true) }}{{ 1.0|tojson }}{{ no|tojson }}{{ t|tojson }}{{ {}|tojson(indent=2) }}{{ []|tojson }}
{{ d|tojson(indent=4) }}{{ d|tojson(sort_keys=true) }}{{ l|tojson(separators=(',', ':')) }}{{ 'a\\u0001\\u007f\\/'|tojson }}
{{ 1e16|tojson }}{{ 1e15 }}{{ 0.0001 }}{{ 0.00001 }}{{ 1.5e300 }}{{ 100.0 }}{{ 1/3 }}{{ 10**20 }}
{{ s is string }}{{ s is mapping }}{{ s is iterable }}{{ s is sequence }}{{ d is mapping }}{{ d is sequence }}{{ l is sequence }}{{ n is number }}{{ t is number }}{{ t is boolean }}{{ t is integer }}{{ n is integer }}{{ f is float }}{{ no is none }}{{ n is not none }}{{ missing is undefined }}{{ t is true }}{{ n is true }}{{ no is iterable }}
{{ n is odd }}{{ n is even }}{{ n is divisibleby 7 }}{{ n is divisibleby(2) }}{{ n is in [1, 7] }}{{ 'a' is lower }}{{ 'A' is upper }}{{ raise_exception is defined }}{{ t is sameas true }}{{ n is eq 7 }}{{ range is callable }}
{{ 'a' in 'abc' }}{{ 'b' in d }}{{ 5 in l }}{{ 5 not in l }}{{ 'x' in missing }}{{ 1 < 2 < 3 }}{{ 1 < 3 < 2 }}{{ 1 == 1.0 }}{{ t == 1 }}{{ 'a' < 'b' }}{{ [1,2] < [1,3] }}{{ [1] == [1] }}{{ d == d }}
{{ 'x' in no }}
{{ 1 < 'a' }}
{{ e or 'x' }}{{ s and 'y' }}{{ no and 'z' }}{{ not s }}{{ not not s }}{{ e or no }}{{ 'a' if t }}{{ 'a' if no }}{{ 'a' if no else 'b' if no else 'c' }}
{% set x = 1 %}{% for i in l %}{% set x = i %}{{ x }}{% endfor %}{{ x }}
{% set ns = namespace(a=1) %}{% for i in l %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}{{ ns.zz }}{{ ns.zz is defined }}
{% for i in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }}{{ loop.cycle('a', 'b') }} {% endfor %}
{% for i in [] %}x{% else %}empty{% endfor %}{% for i in missing %}x{% else %}none{% endfor %}{% for c in 'abc' %}{{ c }}.{% endfor %}{% for k in d %}{{ k }},{% endfor %}
{% for i in no %}x{% endfor %}
{% for i in l if i > 1 %}{{ i }}{{ loop.index }}{{ loop.last }}{% endfor %}{% for a, b in [[1, 2], [3, 4]] %}{{ a + b }}{% endfor %}{% for i in range(10) %}{% if i == 2 %}{% continue %}{% elif i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}
{% for i in range(2) %}{% for j in range(2) %}{{ loop.index }}{{ loop.depth }}{% endfor %}{{ loop.index }}{{ loop.depth0 }}{% endfor %}
{{ range(3)|list }}{{ range(1, 4)|list }}{{ range(5, 0, -2)|list }}{{ range(0)|list }}
{% macro f(a, b=2) %}{{ a }}{{ b }}{{ s }}{% endmacro %}{{ f(1) }}{{ f(1, b=3) }}{{ f(b=1, a=0) }}{{ f() }}{{ f(1)|upper }}
{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, 2) }}
{% set x = 5 %}{% macro g() %}{{ x }}{% endmacro %}{% set x = 6 %}{{ g() }}{% macro h(k) %}{% if k %}{{ k }}{{ h(k - 1) }}{% endif %}{% endmacro %}{{ h(3) }}
{% for q in [1] %}{% macro g2() %}{{ s }}{% endmacro %}{{ g2() }}{% endfor %}
{% set x %}a{{ n }}b{% endset %}{{ x }}{% set y | upper %}abc{% endset %}{{ y }}{% set a, b = 1, 2 %}{{ a }}{{ b }}{% filter upper %}x{{ s }}{% endfilter %}{% with a = 9, z = 3 %}{{ a }}{{ z }}{% endwith %}{{ a }}
{% raw %}{{ s }} {% if %}{% endraw %}|{%- raw -%}  x  {%- endraw -%}  |
{# c #}a{#- c -#}  b {# c #} c{{- s -}}  d{{ s }}  e
{{ 'a\\tb\\x41\\u00e4\\'\\"\\\\\\d' }}{{ "a" 'b' "c" }}{{ 1_000 }}{{ 1.5e3 }}{{ (1,)|length }}{{ ()|length }}{{ [1, 2,] }}{{ {'a': 1,} }}
{{ {'a': {'b': {}}} }}{{ {'a': 1, 'a': 2}.a }}{{ {1: 'x'}[1] }}{{ dict(a=1, b=2) }}{{ dict([['k', 'v']]) }}
{{ l.append(1) }}
{{ 'ab' * 3 }}{{ [1] * 2 }}{{ l + [4] }}{{ l + l[1:] }}
{{ strftime_now('%Y-%m-%d %H:%M:%S %d %b %B %A %a %j %I %p %y %e %-d %%') }}
{{ raise_exception('no: ' ~ n) }}
{{ nofunction() }}
{{ s|nofilter }}
{{ s is notest }}
{{ s.nomethod() }}
{{ m[0].role }}{{ m[1]['role'] }}{{ m[-1].n }}{{ m|map(attribute='role')|join }}{{ m[0]|tojson }}{{ (m|first).role }}{{ m|last|tojson }}
{{ m[0].get('role') == 'user' and (m|length > 2 or t) }}{{ (n if t else 0) + 1 }}{{ not t or n == 7 }}{{ n is defined and n is number }}{{ not n is defined }}
{{ d.a[1].x }}{{ d.a[1].x is none }}{{ d['a'][1]['x'] is defined }}{{ d.a.1.x }}{{ s.upper().lower().title()[0:3] }}
{{ [l, l]|tojson }}{{ l|list|tojson }}{{ d.values()|list }}{{ d|items|list|length }}{{ missing|items|list }}{{ m|map(attribute='zz', default='q')|list }}
{{ '' ~ missing }}{{ [missing] }}{{ missing|length }}{{ missing|list }}{{ missing|string }}|{{ missing|trim }}|{{ missing|upper }}
"""
# One snippet, about space around tags.
SPACE = """\
{% if s %}
  in
    {% if t %}
      deep
    {% endif %}
  out
{% endif %}
  {% if t -%}   x
  y   {%- endif %}  z
a
 {%+ if t %}b{% endif +%}
c
{{ s }}
 {{ s }}
x {% if t %} y {% endif %}
 {% set q = 1 %}
end
{%- for i in l %}
 {{ i }}
{%- endfor %}
"""


def fixed_clock():
    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(*MOMENT)

    utils.datetime = Clock


def rendered(source, variables):
    try:
        return {"text": utils._compile_jinja_template(source).render(**variables)}
    except jinja2.exceptions.TemplateError as error:
        own = type(error) is jinja2.exceptions.TemplateError
        return {"error": str(error) if own else None}
    except (TypeError, ZeroDivisionError, ValueError, AttributeError):
        return {"error": None}


def case(template, messages, options):
    extra = dict(options["extra"])
    variables = {key: options[key] for key in ("add_generation_prompt", "bos_token", "eos_token", "tools")}
    given = {"messages": messages, "documents": None, **variables, **extra}
    return {"template": template, "messages": messages, "options": options, **rendered(TEMPLATES[template], given)}


def main(path):
    fixed_clock()
    cases = [case(name, talk, options) for name in TEMPLATES for talk in TALKS.values() for options in OPTIONS]
    sources = SNIPPETS.splitlines() + [SPACE, SPACE.replace("\n", "\r\n")]
    snippets = [{"source": source, "text": rendered(source, VARS).get("text")} for source in sources]
    golden = {
        "versions": {"transformers": transformers.__version__, "jinja2": jinja2.__version__},
        "moment": MOMENT,
        "templates": TEMPLATES,
        "vars": VARS,
        "cases": cases,
        "snippets": snippets,
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(golden, file, ensure_ascii=False, indent=1)
        file.write("\n")


main(sys.argv[1])
