// Command conformance is driven by `kvstrata conformance -- ./conformance`: one request and one answer a line, in JSON.
package main

import (
	"bufio"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	kvstrata "kvstrata.io/client"
)

type request struct {
	Op         string          `json:"op"`
	Secret     string          `json:"secret"`
	Layout     kvstrata.Layout `json:"layout"`
	Variant    string          `json:"variant"`
	Parent     string          `json:"parent"`
	Tokens     [][2]uint32     `json:"tokens"`
	Digest     string          `json:"digest"`
	Epoch      string          `json:"epoch"`
	Stamp      string          `json:"stamp"`
	Seed       uint64          `json:"seed"`
	Bytes      int             `json:"bytes"`
	Socket     string          `json:"socket"`
	Pool       string          `json:"pool"`
	Token      string          `json:"token"`
	Session    string          `json:"session"`
	DeadlineS  float64         `json:"deadline_s"`
	LeaseS     float64         `json:"lease_s"`
	FirstBlock int             `json:"first_block"`
	Hint       string          `json:"hint"`
	Seconds    float64         `json:"seconds"`
}

type reply map[string]any

type program struct {
	client     *kvstrata.Client
	blockBytes int
	leases     *kvstrata.Leases
}

func main() {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<20)
	p := &program{}
	for lines.Scan() {
		var asked request
		if err := json.Unmarshal(lines.Bytes(), &asked); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		line, err := json.Marshal(p.answer(asked))
		if err != nil {
			panic(err)
		}
		fmt.Println(string(line))
	}
}

func (p *program) answer(asked request) reply {
	switch asked.Op {
	case "keys":
		return keys(asked)
	case "checksum":
		epoch, _ := strconv.ParseUint(asked.Epoch, 10, 64)
		stamp, _ := strconv.ParseUint(asked.Stamp, 10, 64)
		sum := kvstrata.Checksum(blockOf(asked.Seed, 0, asked.Bytes), unhex(asked.Digest), epoch, stamp)
		return reply{"checksum": hex.EncodeToString(sum[:])}
	case "attach":
		return p.attach(asked)
	case "lookup":
		blocks, err := p.client.Lookup(tokens(asked), asked.Session)
		return told(reply{"blocks": blocks}, err)
	case "load":
		blocks, err := p.client.Load(tokens(asked), seconds(asked.DeadlineS))
		return told(digests(blocks), err)
	case "store":
		stored, err := p.client.Store(tokens(asked), asked.FirstBlock, func(index int) []byte {
			return blockOf(asked.Seed, index, p.blockBytes)
		})
		return told(reply{"published": stored.Published, "existed": stored.Existed, "refused": stored.Refused}, err)
	case "acquire":
		var err error
		p.leases, err = p.client.Acquire(tokens(asked), seconds(asked.LeaseS), 2*time.Second)
		return told(reply{"leased": p.leases.Blocks()}, err)
	case "finish":
		blocks, err := p.client.Finish(p.leases)
		return told(digests(blocks), err)
	case "reserve":
		taken, err := p.client.Reserve(tokens(asked))
		return told(reply{"reserved": taken}, err)
	case "open_session":
		if err := p.client.OpenSession(asked.Session); err != nil {
			return told(reply{"opened": false}, err)
		}
		return reply{"opened": true}
	case "hint":
		return p.hint(asked)
	}
	return reply{"error": "UnsupportedError", "message": "op " + asked.Op}
}

func (p *program) hint(asked request) reply {
	var outcome string
	var err error
	switch asked.Hint {
	case "pin":
		outcome, err = p.client.Pin(tokens(asked), seconds(asked.Seconds))
	case "prefetch":
		outcome, err = p.client.Prefetch(tokens(asked), asked.Session)
	case "fetch":
		outcome, err = p.client.Fetch(tokens(asked), asked.Session)
	case "demote":
		outcome, err = p.client.Demote(tokens(asked))
	case "retain":
		outcome, err = p.client.Retain(asked.Session, seconds(asked.Seconds))
	case "complete":
		outcome, err = p.client.Complete(asked.Session)
	case "tool_wait":
		outcome, err = p.client.ToolWait(asked.Session, seconds(asked.Seconds))
	default:
		return reply{"error": "UnsupportedError", "message": "hint " + asked.Hint}
	}
	return told(reply{"outcome": outcome}, err)
}

// told turns what is wrong with the request itself into an answer; anything else was a miss.
func told(answer reply, err error) reply {
	var failure *kvstrata.Failure
	if errors.As(err, &failure) && failure.Code == "InvalidInputError" {
		return reply{"error": failure.Code, "message": failure.Message}
	}
	return answer
}

func (p *program) attach(asked request) reply {
	if p.client != nil {
		p.client.Close()
	}
	var err error
	p.blockBytes = asked.Layout.BlockBytes()
	p.client, err = kvstrata.New(kvstrata.Target{
		Socket: asked.Socket, Pool: asked.Pool, TokenText: asked.Token, Layout: asked.Layout,
		Name: "conformance.go", Timeout: 3 * time.Second,
	})
	if err == nil {
		return reply{"attached": true}
	}
	var failure *kvstrata.Failure
	if errors.As(err, &failure) {
		return reply{"attached": false, "error": failure.Code}
	}
	return reply{"attached": false, "error": err.Error()}
}

func keys(asked request) reply {
	layoutID := asked.Layout.ID()
	if asked.Variant != "" {
		layoutID = kvstrata.VariantID(layoutID, asked.Variant)
	}
	made := []string{}
	for _, key := range kvstrata.Keys(
		unhex(asked.Secret), layoutID, tokens(asked), asked.Layout.BlockTokens, unhex(asked.Parent),
	) {
		made = append(made, hex.EncodeToString(key))
	}
	return reply{"layout_id": hex.EncodeToString(layoutID), "keys": made}
}

func digests(blocks [][]byte) reply {
	made := []string{}
	for _, block := range blocks {
		digest := sha256.Sum256(block)
		made = append(made, hex.EncodeToString(digest[:]))
	}
	return reply{"blocks": len(blocks), "sha256": made}
}

func blockOf(seed uint64, index, size int) []byte {
	block := make([]byte, 0, size+sha256.Size)
	for i := uint64(0); len(block) < size; i++ {
		said := binary.LittleEndian.AppendUint64(nil, seed)
		said = binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(said, uint64(index)), i)
		digest := sha256.Sum256(said)
		block = append(block, digest[:]...)
	}
	return block[:size]
}

func tokens(asked request) []uint32 {
	var made []uint32
	for _, run := range asked.Tokens {
		for i := uint32(0); i < run[1]; i++ {
			made = append(made, run[0]+i)
		}
	}
	return made
}

func seconds(count float64) time.Duration { return time.Duration(count * float64(time.Second)) }

func unhex(text string) []byte {
	value, err := hex.DecodeString(text)
	if err != nil {
		panic(err)
	}
	return value
}
