"""Replies: what a model wrote, split into reasoning, text and calls."""

from foreword.text.reply.format import ReplyFormat as ReplyFormat
from foreword.text.reply.format import choose_format as choose_format
from foreword.text.reply.reader import Call as Call
from foreword.text.reply.reader import Part as Part
from foreword.text.reply.reader import Reasoning as Reasoning
from foreword.text.reply.reader import ReplyReader as ReplyReader
from foreword.text.reply.reader import Text as Text
