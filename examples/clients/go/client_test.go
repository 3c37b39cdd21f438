package kvstrata

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

const (
	extentBytes = 4096
	firstEpoch  = 5
	firstStamp  = 7
)

var (
	testLayout = Layout{
		Model: "m", Revision: "r", Dtype: "bf16", BlockTokens: 16,
		Layers: 1, KvHeads: 1, HeadDim: 8, ElementBytes: 2, KvParts: 2,
	}
	testSecret = bytes.Repeat([]byte("s"), scopeSecretBytes)
	testTokens = make([]uint32, 16)
)

// scriptedAgent has one block, in extent 3, and answers Reserve with what a test wants: the values behind the version.
type scriptedAgent struct {
	extent   *os.File
	reserved []any
	granted  bool // Whether that grants the extent once more.
}

// attached is a client of the agent, which ends with the test.
func (a *scriptedAgent) attached(t *testing.T) *Client {
	t.Helper()
	folder := t.TempDir()
	extent, err := os.Create(filepath.Join(folder, "extent"))
	if err == nil {
		err = extent.Truncate(extentBytes)
	}
	if err == nil {
		_, err = extent.WriteAt(a.block(), 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	a.extent = extent
	listener, err := net.Listen("unix", filepath.Join(folder, "agent.sock"))
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		if accepted, err := listener.Accept(); err == nil {
			a.serve(t, accepted.(*net.UnixConn))
		}
	}()
	client, err := New(Target{
		Socket: listener.Addr().String(), Pool: "pool", TokenText: "token", Layout: testLayout, Name: "test",
		Timeout: 10 * time.Second,
	})
	t.Cleanup(func() {
		client.Close()
		listener.Close()
		<-served
		extent.Close()
	})
	if err != nil {
		t.Fatal(err)
	}
	return client
}

func (a *scriptedAgent) block() []byte { return bytes.Repeat([]byte("b"), testLayout.BlockBytes()) }

func (a *scriptedAgent) serve(t *testing.T, connected *net.UnixConn) {
	defer connected.Close()
	for {
		size := make([]byte, 4)
		if _, err := io.ReadFull(connected, size); err != nil {
			return // The client has gone.
		}
		body := make([]byte, binary.BigEndian.Uint32(size))
		if _, err := io.ReadFull(connected, body); err != nil {
			return
		}
		name, rest, err := parseValue(body[1:]) // Behind the head of the array: an Attach has a map, which is not parsed.
		if err != nil {
			t.Errorf("a request is none: %v", err)
			return
		}
		id, _, _ := parseValue(rest)
		answer, isGranting := a.answer(name.(string), id)
		frame := appendValue(nil, answer)
		frame = append(binary.BigEndian.AppendUint32(nil, uint32(len(frame))), frame...)
		var beside []byte
		if isGranting {
			beside = syscall.UnixRights(int(a.extent.Fd()))
		}
		if _, _, err := connected.WriteMsgUnix(frame, beside, nil); err != nil {
			return
		}
	}
}

func (a *scriptedAgent) answer(name string, id any) (answer []any, isGranting bool) {
	switch name {
	case "Hello":
		return []any{"Welcome", id, 1, protocolVersion, "agent", "node", firstEpoch}, false
	case "Attach":
		scope := []any{"scope", "tenant", "a", testSecret, true}
		return []any{"Granted", id, 1, "a", []any{scope}, "scope", testLayout.BlockBytes(), extentBytes, 600.0}, false
	case "Acquire":
		key := Keys(testSecret, testLayout.ID(), testTokens, testLayout.BlockTokens, nil)[0]
		sum := Checksum(a.block(), key, firstEpoch, firstStamp)
		leased := []any{8, 3, 0, firstStamp, sum[:], "dram"}
		extent := []any{3, extentBytes, false}
		return []any{"Acquired", id, 1, []any{leased}, []any{extent}, firstEpoch, []any{}}, true
	case "Reserve":
		return append([]any{"Reserved", id, 1}, a.reserved...), a.granted
	}
	return []any{"Done", id, 1, 1}, false
}

func TestALeaseWhoseExtentHasGoneIsLost(t *testing.T) {
	agent := &scriptedAgent{reserved: []any{[]any{}, []any{}, firstEpoch, 30.0, []any{3}}}
	client := agent.attached(t)
	leases, err := client.Acquire(testTokens, time.Second, 0)
	if err != nil || leases.Blocks() != 1 {
		t.Fatalf("%d blocks are leased, 1 wanted: %v", leases.Blocks(), err)
	}
	if _, err := client.Store(testTokens, 0, nil); err != nil {
		t.Fatal(err)
	}
	if blocks, err := client.Finish(leases); len(blocks) != 0 || !errors.Is(err, ErrLost) {
		t.Errorf("%d blocks are read, none wanted: %v", len(blocks), err)
	}
}

func TestALeaseIsReadInAnExtentThatWasGrantedAgain(t *testing.T) {
	slots, extents := []any{[]any{0, 0, 0, 0}}, []any{[]any{3, extentBytes, true}}
	agent := &scriptedAgent{reserved: []any{slots, extents, firstEpoch, 30.0, []any{}}, granted: true}
	client := agent.attached(t)
	leases, err := client.Acquire(testTokens, time.Second, 0)
	if err != nil || leases.Blocks() != 1 {
		t.Fatalf("%d blocks are leased, 1 wanted: %v", leases.Blocks(), err)
	}
	if stored, err := client.Store(testTokens, 0, nil); err != nil || stored.Existed != 1 {
		t.Fatalf("%d blocks existed, 1 wanted: %v", stored.Existed, err)
	}
	if blocks, err := client.Finish(leases); err != nil || len(blocks) != 1 || !bytes.Equal(blocks[0], agent.block()) {
		t.Errorf("%d blocks are read, 1 wanted: %v", len(blocks), err)
	}
}
