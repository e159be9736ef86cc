using System;
using System.Collections.Generic;
using System.Globalization;
using System.IO;
using System.Linq;
using System.Reflection;
using System.Text;

namespace Tables;

/// <summary>Reads comma-separated values, with quotes as RFC 4180 has them.</summary>
public sealed class CsvReader : IDisposable
{
    private readonly TextReader _reader;
    private readonly char _delimiter;
    private readonly bool _leaveOpen;
    private int _line = 1;

    public CsvReader(TextReader reader, char delimiter = ',', bool leaveOpen = false)
    {
        _reader = reader ?? throw new ArgumentNullException(nameof(reader));
        _delimiter = delimiter;
        _leaveOpen = leaveOpen;
    }

    /// <summary>The line that the next record starts on, from 1.</summary>
    public int Line => _line;

    public IEnumerable<IReadOnlyList<string>> Records()
    {
        while (ReadRecord() is { } record)
        {
            yield return record;
        }
    }

    /// <summary>Maps records to objects by the names in the first one.</summary>
    public IEnumerable<T> Objects<T>() where T : new()
    {
        var header = ReadRecord();
        if (header is null)
        {
            yield break;
        }
        var properties = typeof(T)
            .GetProperties(BindingFlags.Public | BindingFlags.Instance)
            .Where(property => property.CanWrite)
            .ToDictionary(property => property.Name, StringComparer.OrdinalIgnoreCase);
        var columns = header.Select(name => properties.GetValueOrDefault(name.Trim())).ToArray();
        while (true)
        {
            var line = _line;
            if (ReadRecord() is not { } record)
            {
                yield break;
            }
            if (record.Count != columns.Length)
            {
                throw new InvalidDataException(
                    $"line {line}: expected {columns.Length} fields, found {record.Count}");
            }
            var item = new T();
            for (var i = 0; i < columns.Length; i++)
            {
                columns[i]?.SetValue(item, Parse(record[i], columns[i]!.PropertyType, line));
            }
            yield return item;
        }
    }

    public void Dispose()
    {
        if (!_leaveOpen)
        {
            _reader.Dispose();
        }
    }

    private List<string>? ReadRecord()
    {
        if (_reader.Peek() < 0)
        {
            return null;
        }
        var fields = new List<string>();
        var field = new StringBuilder();
        var quoted = false;
        while (true)
        {
            var next = _reader.Read();
            var letter = (char)next;
            if (next < 0 || (!quoted && letter == '\n'))
            {
                if (next < 0 && quoted)
                {
                    throw new InvalidDataException($"line {_line}: a quote is never closed");
                }
                _line++;
                fields.Add(field.ToString());
                return fields;
            }
            switch (letter)
            {
                case '"' when quoted && _reader.Peek() == '"':
                    _reader.Read();
                    field.Append('"');
                    break;
                case '"' when quoted || field.Length == 0:
                    quoted = !quoted;
                    break;
                case '\r' when !quoted && _reader.Peek() == '\n':
                    break;
                case var c when c == _delimiter && !quoted:
                    fields.Add(field.ToString());
                    field.Clear();
                    break;
                default:
                    _line += letter == '\n' ? 1 : 0;
                    field.Append(letter);
                    break;
            }
        }
    }

    private static object? Parse(string text, Type type, int line)
    {
        var target = Nullable.GetUnderlyingType(type);
        if (target is not null && text.Length == 0)
        {
            return null;
        }
        target ??= type;
        try
        {
            return target.IsEnum
                ? Enum.Parse(target, text, ignoreCase: true)
                : Convert.ChangeType(text, target, CultureInfo.InvariantCulture);
        }
        catch (Exception error) when (error is FormatException or OverflowException)
        {
            throw new InvalidDataException($"line {line}: \"{text}\" is no {target.Name}", error);
        }
    }
}
