package kvstrata

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"
)

// Numbers of docs/protocol.md.
const (
	KeyBytes         = 20
	KeysMax          = 65_536
	protocolVersion  = 1
	frameBytesMax    = 4 << 20
	fdsPerFrameMax   = 64
	scopeSecretBytes = 32
	checksumBytes    = 16
)

// Failure is an agent's refusal.
type Failure struct {
	Code    string // InvalidInputError, UnauthenticatedError, ...
	Message string
}

func (f *Failure) Error() string { return f.Code + ": " + f.Message }

var errMalformed = errors.New("the agent's answer makes no sense")

// answer is a message of the agent: its name, and the values behind its id.
type answer struct {
	name   string
	values []any
}

// at is the i-th value behind name and id, or the zero of T for one that an older agent does not send.
func at[T any](a answer, i int) T {
	var value T
	if i < len(a.values) {
		value, _ = a.values[i].(T)
	}
	return value
}

// nested is an array within an answer; empty for what is none.
func nested(item any) answer {
	values, _ := item.([]any)
	return answer{values: values}
}

// connection is one attachment to an agent: all that is held with it ends with it.
type connection struct {
	socket     *net.UnixConn
	received   []byte
	fds        []int
	lastID     uint64
	seen       uint64 // The highest version of grants that an answer has named.
	version    uint64 // That of the grants here.
	scope      string // Where new blocks go.
	secret     []byte
	blockBytes int
	renewAt    time.Time
	extents    map[uint64]*extent // Slots are looked up in it when they are used, for any answer may take one away.
}

type extent struct {
	memory     []byte
	isWritable bool
}

// connect greets and attaches.
func connect(target Target) (*connection, error) {
	dialed, err := net.DialTimeout("unix", target.Socket, target.Timeout)
	if err != nil {
		return nil, err
	}
	c := &connection{socket: dialed.(*net.UnixConn), extents: map[uint64]*extent{}}
	welcome, err := c.ask(target.Timeout, "Hello", protocolVersion, target.Name)
	if err == nil && at[uint64](welcome, 1) != protocolVersion {
		err = &Failure{"UnsupportedError", fmt.Sprintf("the agent speaks version %d", at[uint64](welcome, 1))}
	}
	if err == nil {
		err = c.attach(target)
	}
	if err != nil {
		c.close()
		return nil, err
	}
	return c, nil
}

// noDevices says that this client opens the memory of no device.
var noDevices = []any{}

// attach presents the token, for the first time or again.
func (c *connection) attach(target Target) error {
	token, err := target.Token()
	if err != nil {
		return err
	}
	granted, err := c.ask(target.Timeout, "Attach", token, target.Pool, target.Layout.fields(), noDevices)
	if err != nil {
		return err
	}
	expires := time.Duration(at[float64](granted, 6) * 0.8 * float64(time.Second))
	c.renewAt = time.Now().Add(max(expires, time.Second))
	c.blockBytes = int(at[uint64](granted, 4))
	if c.blockBytes != target.Layout.BlockBytes() {
		return fmt.Errorf("the agent's blocks have %d B, ours %d B", c.blockBytes, target.Layout.BlockBytes())
	}
	return c.grant(granted)
}

// grant takes what a Granted says: where new blocks go, and the secret of that scope.
func (c *connection) grant(granted answer) error {
	c.version, c.scope, c.secret = at[uint64](granted, 0), at[string](granted, 3), nil
	for _, item := range at[[]any](granted, 2) {
		scope := nested(item)
		if at[string](scope, 0) == c.scope && len(at[[]byte](scope, 3)) == scopeSecretBytes {
			c.secret = at[[]byte](scope, 3)
		}
	}
	if c.secret == nil {
		return errMalformed
	}
	return nil
}

// refresh brings rights up to date: a token that is nearly over, and grants that have changed.
func (c *connection) refresh(target Target) error {
	if time.Now().After(c.renewAt) {
		return c.attach(target)
	}
	if c.seen <= c.version {
		return nil
	}
	granted, err := c.ask(target.Timeout, "Scopes")
	if err != nil {
		return err
	}
	return c.grant(granted)
}

// ask sends one request and returns its answer. After any error but a Failure the connection is of no use: an answer
// that comes too late would bring what nobody holds.
func (c *connection) ask(wait time.Duration, name string, arguments ...any) (answer, error) {
	c.lastID++
	body := appendValue(nil, append([]any{name, c.lastID}, arguments...))
	if len(body) > frameBytesMax {
		return answer{}, &Failure{"InvalidInputError", fmt.Sprintf("frame of %d B, limit %d B", len(body), frameBytesMax)}
	}
	if err := c.socket.SetDeadline(time.Now().Add(wait)); err != nil {
		return answer{}, err
	}
	if _, err := c.socket.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...)); err != nil {
		return answer{}, err
	}
	for {
		id, found, err := c.next()
		if err != nil || id != c.lastID && id != 0 {
			if err != nil {
				return answer{}, err
			}
			continue
		}
		c.seen = max(c.seen, at[uint64](found, 0))
		if found.name == "Failed" {
			return answer{}, &Failure{at[string](found, 1), at[string](found, 2)}
		}
		return found, nil
	}
}

// next reads one frame, and maps what it grants.
func (c *connection) next() (id uint64, found answer, err error) {
	for len(c.received) < 4 || len(c.received) < 4+int(binary.BigEndian.Uint32(c.received)) {
		if len(c.received) >= 4 && binary.BigEndian.Uint32(c.received) > frameBytesMax {
			return 0, answer{}, errMalformed
		}
		if err := c.read(); err != nil {
			return 0, answer{}, err
		}
	}
	size := 4 + int(binary.BigEndian.Uint32(c.received))
	value, _, err := parseValue(c.received[4:size])
	c.received = c.received[size:]
	items, isArray := value.([]any)
	if err != nil || !isArray || len(items) < 2 {
		return 0, answer{}, errors.Join(err, errMalformed)
	}
	id, isID := items[1].(uint64)
	name, isName := items[0].(string)
	if !isID || !isName {
		return 0, answer{}, errMalformed
	}
	found = answer{name, items[2:]}
	if name == "Acquired" || name == "Reserved" {
		err = c.install(found)
	}
	return id, found, err
}

// read takes a chunk from the socket, and the descriptors beside it.
func (c *connection) read() error {
	chunk, beside := make([]byte, 64<<10), make([]byte, syscall.CmsgSpace(4*fdsPerFrameMax))
	n, besides, flags, _, err := c.socket.ReadMsgUnix(chunk, beside)
	if err != nil {
		return err
	}
	messages, err := syscall.ParseSocketControlMessage(beside[:besides])
	for i := range messages {
		var fds []int
		if fds, err = syscall.ParseUnixRights(&messages[i]); err == nil {
			c.fds = append(c.fds, fds...)
		}
	}
	if flags&syscall.MSG_CTRUNC != 0 {
		return errors.New("descriptors were cut off")
	}
	if n == 0 {
		return net.ErrClosed
	}
	c.received = append(c.received, chunk[:n]...)
	return err
}

// install maps the extents that an answer grants. Both kinds have blocks, extents, epoch, then something, then gone.
func (c *connection) install(found answer) error {
	for _, item := range at[[]any](found, 2) {
		grant := nested(item)
		if len(c.fds) == 0 {
			return errMalformed
		}
		fd := c.fds[0]
		c.fds = c.fds[1:]
		number, isWritable := at[uint64](grant, 0), at[bool](grant, 2)
		protection := syscall.PROT_READ
		if isWritable {
			protection |= syscall.PROT_WRITE
		}
		memory, err := syscall.Mmap(fd, 0, int(at[uint64](grant, 1)), protection, syscall.MAP_SHARED)
		syscall.Close(fd)
		if err != nil {
			return err
		}
		c.forget(number)
		c.extents[number] = &extent{memory, isWritable}
	}
	gone := 4
	if found.name == "Reserved" {
		gone = 5
	}
	for _, item := range at[[]any](found, gone) {
		number, _ := item.(uint64)
		c.forget(number)
	}
	return nil
}

// forget unmaps an extent, if it is there.
func (c *connection) forget(number uint64) {
	if old := c.extents[number]; old != nil {
		delete(c.extents, number)
		_ = syscall.Munmap(old.memory)
	}
}

// slot is the memory of one block, until the next request is asked.
func (c *connection) slot(number, offset uint64, isWritable bool) ([]byte, error) {
	found, size := c.extents[number], uint64(c.blockBytes)
	if found == nil || isWritable && !found.isWritable {
		return nil, errMalformed
	}
	if whole := uint64(len(found.memory)); offset > whole || size > whole-offset {
		return nil, errMalformed
	}
	return found.memory[offset : offset+size : offset+size], nil
}

// close ends the connection and takes its memory back: no slot may be touched afterwards.
func (c *connection) close() {
	_ = c.socket.Close()
	for _, fd := range c.fds {
		_ = syscall.Close(fd)
	}
	for number := range c.extents {
		c.forget(number)
	}
	c.fds = nil
}
