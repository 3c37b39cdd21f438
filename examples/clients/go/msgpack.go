package kvstrata

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
)

// As much of msgpack as the protocol needs. Values are nil, bool, uint64, int64 (negative), float64, string, []byte,
// []any and, for what is written, fields.

// fields is a map whose order is kept.
type fields []struct {
	name  string
	value any
}

var errShort = errors.New("msgpack: the value is cut off")

func appendValue(to []byte, value any) []byte {
	switch v := value.(type) {
	case nil:
		return append(to, 0xc0)
	case bool:
		if v {
			return append(to, 0xc3)
		}
		return append(to, 0xc2)
	case int:
		return appendUint(to, uint64(v))
	case uint64:
		return appendUint(to, v)
	case float64:
		return binary.BigEndian.AppendUint64(append(to, 0xcb), math.Float64bits(v))
	case string:
		return append(appendSize(to, len(v), 0xa0, 32, 0xd9), v...)
	case []byte:
		return append(appendSize(to, len(v), 0, 0, 0xc4), v...)
	case []any:
		to = appendSize(to, len(v), 0x90, 16, 0xdb)
		for _, item := range v {
			to = appendValue(to, item)
		}
		return to
	case fields:
		to = appendSize(to, len(v), 0x80, 16, 0xdd)
		for _, field := range v {
			to = appendValue(appendValue(to, field.name), field.value)
		}
		return to
	}
	panic(fmt.Sprintf("msgpack: no value of the protocol is a %T", value))
}

func appendUint(to []byte, value uint64) []byte {
	switch {
	case value < 128:
		return append(to, byte(value))
	case value < 1<<8:
		return append(to, 0xcc, byte(value))
	case value < 1<<16:
		return binary.BigEndian.AppendUint16(append(to, 0xcd), uint16(value))
	case value < 1<<32:
		return binary.BigEndian.AppendUint32(append(to, 0xce), uint32(value))
	}
	return binary.BigEndian.AppendUint64(append(to, 0xcf), value)
}

// appendSize writes a length: within the first byte below fixMax, else behind code, code+1 or code+2. Arrays and maps
// have no code for one byte of length.
func appendSize(to []byte, size int, fix byte, fixMax int, code byte) []byte {
	hasByte := code == 0xd9 || code == 0xc4
	switch {
	case size < fixMax:
		return append(to, fix|byte(size))
	case hasByte && size < 1<<8:
		return append(to, code, byte(size))
	case size < 1<<16:
		return binary.BigEndian.AppendUint16(append(to, code+1), uint16(size))
	}
	return binary.BigEndian.AppendUint32(append(to, code+2), uint32(size))
}

// parseValue reads the value that data begins with, and returns what is left.
func parseValue(data []byte) (any, []byte, error) {
	if len(data) == 0 {
		return nil, nil, errShort
	}
	code, rest := data[0], data[1:]
	switch {
	case code < 0x80:
		return uint64(code), rest, nil
	case code < 0x90:
		return nil, nil, errors.New("msgpack: no answer has a map")
	case code < 0xa0:
		return parseArray(rest, int(code&0x0f))
	case code < 0xc0:
		return parseText(rest, int(code&0x1f))
	case code >= 0xe0:
		return int64(int8(code)), rest, nil
	}
	switch code {
	case 0xc0:
		return nil, rest, nil
	case 0xc2, 0xc3:
		return code == 0xc3, rest, nil
	}
	width, known := map[byte]int{
		0xc4: 1, 0xc5: 2, 0xc6: 4, 0xca: 4, 0xcb: 8, 0xcc: 1, 0xcd: 2, 0xce: 4, 0xcf: 8, 0xd0: 1, 0xd1: 2, 0xd2: 4,
		0xd3: 8, 0xd9: 1, 0xda: 2, 0xdb: 4, 0xdc: 2, 0xdd: 4,
	}[code]
	if !known {
		return nil, nil, fmt.Errorf("msgpack: code %#x", code)
	}
	if len(rest) < width {
		return nil, nil, errShort
	}
	number := uint64(0)
	for _, b := range rest[:width] {
		number = number<<8 | uint64(b)
	}
	rest = rest[width:]
	switch {
	case code <= 0xc6:
		return parseBytes(rest, number)
	case code == 0xca:
		return float64(math.Float32frombits(uint32(number))), rest, nil
	case code == 0xcb:
		return math.Float64frombits(number), rest, nil
	case code <= 0xcf:
		return number, rest, nil
	case code <= 0xd3:
		shift := 64 - 8*width
		return int64(number<<shift) >> shift, rest, nil
	case code <= 0xdb:
		if number > uint64(len(rest)) {
			return nil, nil, errShort
		}
		return parseText(rest, int(number))
	}
	if number > uint64(len(rest)) {
		return nil, nil, errShort
	}
	return parseArray(rest, int(number))
}

func parseBytes(data []byte, size uint64) (any, []byte, error) {
	if size > uint64(len(data)) {
		return nil, nil, errShort
	}
	return append([]byte(nil), data[:size]...), data[size:], nil
}

func parseText(data []byte, size int) (any, []byte, error) {
	if size > len(data) {
		return nil, nil, errShort
	}
	return string(data[:size]), data[size:], nil
}

func parseArray(data []byte, size int) (any, []byte, error) {
	items := make([]any, size)
	for i := range items {
		var err error
		if items[i], data, err = parseValue(data); err != nil {
			return nil, nil, err
		}
	}
	return items, data, nil
}
